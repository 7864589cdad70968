"""Clusters end runs before they are through: by SLURM's signal, Kubernetes' SIGTERM, or a limit of time."""

import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from launching import Run, running
from numbered_runs import BATCHES_PER_EPOCH, NUM_EPOCHS, WORDS, all_at, allow, alone, verify_same, wait_until

NUM_BATCHES = NUM_EPOCHS * BATCHES_PER_EPOCH
SLURM = {
    "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_JOB_ID": "1234",
    "SLURM_NODEID": "0", "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "0", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def words(folder: Path) -> list[str]:
    """The command that is submitted, and submitted again."""
    return [
        *WORDS, "devices=2", "strategy.batch_size_is=global", f"hydra.run.dir={folder}/logs/digits/ddp/1234",
        "resume=auto", f"module.record={folder}/samples", f"+module.gate={folder}/gate",
    ]  # fmt: skip


def srun(stack: ExitStack, folder: Path, attempt: str) -> list[Run]:
    """Start two tasks, as `srun` does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = []
    for rank in "01":
        (own := folder / f"{attempt}{rank}").mkdir()
        env = {**SLURM, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "MASTER_PORT": port}
        ranks.append(stack.enter_context(running(own, *words(folder), env=env)))
    return ranks


def pod(stack: ExitStack, folder: Path, attempt: str) -> list[Run]:
    """Start torchrun, which is what the container of a pod runs."""
    (own := folder / attempt).mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return [stack.enter_context(running(own, *words(folder), command=command, env={"OMP_NUM_THREADS": "1"}))]


@pytest.mark.long
@pytest.mark.parametrize(("start", "signum", "status"), [(srun, signal.SIGUSR1, 138), (pod, signal.SIGTERM, None)])
def test_a_run_that_is_pre_empted_saves_and_goes_on_in_its_directory(
    start: Callable[[ExitStack, Path, str], list[Run]], signum: signal.Signals, status: int | None, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        undisturbed = alone(stack, tmp_path / "alone")
        allow(tmp_path, 12)
        first = start(stack, tmp_path, "first")
        wait_until(tmp_path / "samples", all_at(13, 2), first)
        for run in first:
            run.process.send_signal(signum)
        for run in first:
            ended = run.wait(300)
            assert ended == status or (status is None and ended != 0), run.output.read_text()
        allow(tmp_path, NUM_BATCHES)
        for run in (*start(stack, tmp_path, "second"), undisturbed):
            assert run.wait(300) == 0, run.output.read_text()
    batches = [line.split()[1:4] for line in (tmp_path / "samples").read_text().splitlines()]
    assert len(batches) == len(set(map(tuple, batches))) == 2 * NUM_BATCHES, "a step was computed twice"
    verify_same(tmp_path, tmp_path / "alone")
