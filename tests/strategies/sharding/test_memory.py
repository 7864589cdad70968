"""A model whose weights and Adam state one process may not allocate trains on ranks that hold a part each."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "sharded_memory.py"
RUNTIME_MIB = 80
"""What a rank takes besides tensors: buffers of gloo, and code that is first run in training."""


@pytest.mark.slow
def test_what_one_process_cannot_hold_trains_in_shards() -> None:
    """48 layers of 4 MiB: weights and AdamW's state are 576 MiB, with gradients 768; each process may map 560 more.

    The shards of 2 and 3 ranks, with gradients, are 384 and 256 MiB; one layer and its gradient are 8.
    """
    command = [sys.executable, BENCHMARK, "--strategies", "single_device", "fsdp", "--limit_mib", "560"]
    done = subprocess.run([*command, "--timeout_s", "250"], capture_output=True, text=True, timeout=560, check=True)
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    found = {(name.strip(), int(ranks)): peak for name, ranks, _, peak in rows}
    assert found["single_device", 1].strip().startswith("failed: Out of memory on cpu, rank 0, in step 0")
    for num_ranks, ideal in ((2, 384 + 8), (3, 256 + 8)):
        peaks = [int(peak) for peak in re.findall(r"(\d+) MiB", found["fsdp", num_ranks])]
        assert len(peaks) == num_ranks, found
        assert max(peaks) <= ideal + RUNTIME_MIB
