"""Machines join and leave a run of torchrun, which ends as the run of one machine that was left alone."""

import os
import signal
import sys
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
from torch.distributed import TCPStore

from evener.strategies import ConfigError
from evener.trainer.launch.cluster import resolved_words


def machine(stack: ExitStack, folder: Path, name: str, port: int, strategy: str) -> Run:
    """Start an agent, as on another machine of the same file system."""
    (own := folder / name).mkdir()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1:4", "--nproc-per-node=1", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job", "--max-restarts=100", "--monitor-interval=0.3",
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
        allow(folder, NUM_EPOCHS * BATCHES_PER_EPOCH)
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
    with pytest.raises(ConfigError, match=r"num_nodes=1:4 needs torchrun"):
        resolved_words(words, SLURMEnvironment(auto_requeue=False))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(ConfigError, match=r"needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        resolved_words(words, TorchElasticEnvironment())
