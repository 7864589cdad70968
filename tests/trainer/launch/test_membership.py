"""Machines join, leave and restart runs of torchrun, and clusters end runs, which go on as if left alone."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import Run, running
from numbered_runs import (
    BATCHES_PER_EPOCH,
    NUM_EPOCHS,
    WORDS,
    all_at,
    allow,
    alone,
    present,
    reached,
    trained,
    verify_same,
    wait_until,
)
from pytorch_lightning.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from surroundings import SLURM_JOB, free_port
from torch.distributed import TCPStore

from evener.strategies import ConfigError
from evener.trainer.launch.cluster import resolved_words

NUM_BATCHES = NUM_EPOCHS * BATCHES_PER_EPOCH
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def machine(stack: ExitStack, folder: Path, name: str, port: int, strategy: str) -> Run:
    """Start an agent, as on another machine of the same file system."""
    (own := folder / name).mkdir()
    command = [
        *TORCHRUN, "--nnodes=1:4", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=job", "--max-restarts=100", "--monitor-interval=0.3",
        # agents that beat more often than torch's every 5 s keep a slow one from writing the state that they share
        "--rdzv-conf=is_host=0,last_call_timeout=5",
    ]  # fmt: skip
    words = [
        *WORDS, f"strategy={strategy}", "strategy.batch_size_is=global", "strategy.timeout_s=300", "num_nodes=1:4",
        f"log_dir={folder}/logs", f"module.record={folder}/samples", f"+module.gate={folder}/gate",
    ]  # fmt: skip
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    return stack.enter_context(running(own, *words, command=command, env=env))


def kill(run: Run) -> None:
    """Kill an agent; its worker must die with it."""
    workers = psutil.Process(run.process.pid).children(recursive=True)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive, "an agent's worker outlived it"


def prove(folder: Path, events: list[str], places: list[int], strategy: str) -> None:
    """Let machines join and die, each while a batch waits, and compare the run with one that was left alone.

    A machine that is late, on a busy machine, is not in the next group but makes the one after it, and a group that
    ends goes on for up to three batches: an event comes at its place, or at the later one where all are then.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives every machine, as etcd would
    record = folder / "samples"
    with ExitStack() as stack:
        undisturbed = alone(stack, folder / "alone")
        allow(folder, places[0] - 1)
        machines = [machine(stack, folder, "first", store.port, strategy)]
        for number, (event, place) in enumerate(zip(events, places, strict=True)):
            allow(folder, place - 1)
            wait_until(record, all_at(place, len(machines)), machines)
            if event == "join":
                machines.append(machine(stack, folder, f"{event}{number}", store.port, strategy))
            else:
                kill(machines.pop(int(event)))
                allow(folder, max(place, reached(trained(record))))  # the others find out in the middle of the step
            wait_until(record, came_after(record, len(machines)), machines)
        allow(folder, NUM_BATCHES)
        for run in (undisturbed, *machines):
            assert run.wait(300) == 0, run.output.read_text()
    verify_same(folder, folder / "alone")


def came_after(record: Path, num: int) -> Any:
    """A condition: that many ranks have begun a batch after now."""
    since = len(trained(record))
    return lambda lines: present(lines[since:]) == num


SIX = [4, 9, 15, 22, 30, 41]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("events", "places", "strategy"),
    [
        pytest.param(["join", "0"], [4, 19], "ddp", marks=pytest.mark.long),
        pytest.param(["join", "0"], [4, 19], "fsdp", marks=pytest.mark.slow),
        pytest.param(["join", "join", "1", "join", "0", "0"], SIX, "ddp", marks=pytest.mark.slow),
        pytest.param(["join", "0", "join", "join", "join", "3"], SIX, "ddp", marks=pytest.mark.slow),
    ],
)
def test_machines_that_join_and_die_leave_no_trace(
    events: list[str], places: list[int], strategy: str, tmp_path: Path
) -> None:
    prove(tmp_path, events, places, strategy)


def test_a_range_of_machines_becomes_their_number_and_one_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "my job")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    words = ["strategy=ddp", "num_nodes=1:4", "devices=2"]
    directory = "hydra.run.dir=${log_dir}/${name}/${hydra:runtime.choices.strategy}/my_job"
    expected = ["strategy=ddp", "num_nodes=3", "devices=2", directory, "resume=auto"]
    assert resolved_words(words, TorchElasticEnvironment()) == expected
    assert resolved_words(["num_nodes=2"], TorchElasticEnvironment()) == ["num_nodes=2"]
    with pytest.raises(ConfigError, match=r"num_nodes=1:2 allows 1 to 2 machines; torchrun has started 3"):
        resolved_words(["num_nodes=1:2"], TorchElasticEnvironment())
    with pytest.raises(ConfigError, match=r"so it can't start from resume=last"):
        resolved_words([*words, "resume=last"], TorchElasticEnvironment())
    assert resolved_words(words, SLURMEnvironment(auto_requeue=False)) == words  # refused as a number
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(ConfigError, match=r"needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        resolved_words(words, TorchElasticEnvironment())


def fixed_machine(stack: ExitStack, folder: Path, node: int, port: int) -> Run:
    """Start torchrun on one of two machines, with two ranks."""
    (own := folder / str(node)).mkdir()
    command = [
        *TORCHRUN, "--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}", "--master-addr=127.0.0.1",
        f"--master-port={port}", "--max-restarts=2", "--monitor-interval=0.2",
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
        port = free_port()
        runs = [fixed_machine(stack, tmp_path, node, port) for node in range(2)]
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


def resubmitted(folder: Path) -> list[str]:
    """The command that is submitted, and submitted again."""
    return [
        *WORDS, "devices=2", "strategy.batch_size_is=global", f"hydra.run.dir={folder}/logs/digits/ddp/1234",
        "resume=auto", f"module.record={folder}/samples", f"+module.gate={folder}/gate",
    ]  # fmt: skip


def srun(stack: ExitStack, folder: Path, attempt: str) -> list[Run]:
    """Start two tasks, as `srun` does."""
    common = {**SLURM_JOB, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank in "01":
        (own := folder / f"{attempt}{rank}").mkdir()
        env = {**common, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        ranks.append(stack.enter_context(running(own, *resubmitted(folder), env=env)))
    return ranks


def pod(stack: ExitStack, folder: Path, attempt: str) -> list[Run]:
    """Start torchrun, which is what the container of a pod runs."""
    (own := folder / attempt).mkdir()
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2"]
    return [stack.enter_context(running(own, *resubmitted(folder), command=command, env={"OMP_NUM_THREADS": "1"}))]


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
