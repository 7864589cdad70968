"""Measure how long saving a checkpoint of 200 MB stalls training: Lightning, this project, this project with async.

    python benchmarks/checkpoint.py

All variants save in turn, in several rounds, so that other load affects them equally; medians are compared. The pause
between two saves stands for training steps, during which the background thread writes.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins import TorchCheckpointIO

from evener.trainer.checkpoint.checkpoint_io import VerifiedCheckpointIO
from evener.trainer.checkpoint.file_io import link


def state(num_bytes: int) -> dict[str, Any]:
    """Parameters and AdamW's two moments, of the given total size, in 64 tensors each."""
    size = num_bytes // (3 * 64 * 4)
    parameters = {f"layer.{i}.weight": torch.randn(size) for i in range(64)}
    moments = {i: {"exp_avg": torch.randn(size), "exp_avg_sq": torch.rand(size), "step": 7} for i in range(64)}
    return {"state_dict": parameters, "optimizer_states": [{"state": moments, "param_groups": []}], "global_step": 7}


def written() -> int:
    """Bytes that this process has written (Linux)."""
    return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])


def timed(work: Callable[[], None]) -> float:
    """Seconds that a function takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="number of saves per variant")
    parser.add_argument("--megabytes", type=int, default=200, help="size of the state")
    parser.add_argument("--pause", type=float, default=1.5, help="seconds between two saves")
    options = parser.parse_args()
    checkpoint = state(options.megabytes << 20)
    lightning, ours, background = TorchCheckpointIO(), VerifiedCheckpointIO(), VerifiedCheckpointIO(background=True)
    kinds: dict[str, Any] = {"Lightning": lightning, "evener": ours, "evener, async": background}
    stalls: dict[str, list[float]] = {name: [] for name in kinds}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds + 1):  # the first warms up
            for name, io in kinds.items():
                best, last = f"{folder}/best.ckpt", f"{folder}/last.ckpt"
                before = written()
                stall = timed(lambda io=io, best=best: io.save_checkpoint(checkpoint, best))
                time.sleep(options.pause)
                if isinstance(io, VerifiedCheckpointIO):
                    io.wait()
                    link(best, last)
                else:
                    io.save_checkpoint(checkpoint, last)  # Lightning writes last.ckpt as a second file
                sizes[name] = written() - before
                if number:
                    stalls[name].append(stall)
        background.teardown()
    base = statistics.median(stalls["Lightning"])
    print(f"{options.megabytes} MB, {options.rounds} rounds, torch {torch.__version__}")
    print(f"{'':16}{'stall, median':>16}{'of Lightning':>16}{'bytes for best and last':>28}")
    for name, times in stalls.items():
        stall = statistics.median(times)
        print(f"{name:16}{stall * 1000:13.0f} ms{stall / base:15.0%}{sizes[name] / (1 << 20):25.0f} MB")


if __name__ == "__main__":
    main()
