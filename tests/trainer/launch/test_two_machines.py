"""Training across two machines with torchrun: two agents on this one."""

import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from launching import Run, running


def start(stack: ExitStack, folder: Path, node: int) -> Run:
    """Start torchrun on a machine, with two ranks."""
    (own := folder / str(node)).mkdir()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}",
        "--master-addr=127.0.0.1", "--master-port=29517", "--max-restarts=2", "--monitor-interval=0.2",
    ]  # fmt: skip
    words = [
        "num_nodes=2", f"log_dir={folder}/logs", f"++module.record={folder}/record", "trainer.max_epochs=1",
        "++module.pause_s=0.1", "checkpoint=every_n_steps", "checkpoint.every_n_steps=2",
    ]  # fmt: skip
    run = stack.enter_context(running(own, *words, command=command))
    run.record = folder / "record"
    return run


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_machines_train_together_and_resume_after_a_worker_is_killed(tmp_path: Path) -> None:
    with ExitStack() as stack:
        runs = [start(stack, tmp_path, node) for node in range(2)]
        runs[0].wait_for_step(5, timeout_s=300, num_ranks=4)
        os.kill(next(pid for rank, pid, _ in runs[0].lines() if rank == 3), signal.SIGKILL)
        for run in runs:
            assert run.wait(200) == 0, "\n".join(each.output.read_text() for each in runs)
        steps = [step for rank, _, step in runs[0].lines() if rank == 0]
    restart = next(i for i in range(1, len(steps)) if steps[i] <= steps[i - 1])
    assert steps[restart] >= 4, "it went on from a checkpoint"
    assert steps[restart] % 2 == 0
    assert steps[restart:] == list(range(steps[restart], 32))
    assert len(list(tmp_path.glob("logs/*/*/*"))) == 1
    assert len(list(tmp_path.glob("logs/*/*/*/.hydra"))) == len(list(tmp_path.glob("logs/**/result.json"))) == 1
