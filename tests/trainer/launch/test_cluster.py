"""Under torchrun, SLURM or Kubeflow a process is a rank already: it is recognised, and nothing is started twice."""

import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from launching import Run, running
from regression import quiet_trainer

from evener.strategies import ConfigError, DDPStrategy
from evener.trainer import compose
from evener.trainer.cli.train import prepare
from evener.trainer.launch import launcher as launch
from evener.trainer.launch.environment import detect_launcher

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "7", "RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "0", "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511",
}  # fmt: skip
SLURM = {
    "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_JOB_ID": "1234", "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "0",
}  # fmt: skip
KUBEFLOW = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29511", "WORLD_SIZE": "2", "RANK": "1"}
LAUNCHERS: dict[str, tuple[dict[str, str], list[str]]] = {
    "TorchElasticEnvironment": (TORCHRUN, ["devices=2"]),
    "SLURMEnvironment": (SLURM, ["devices=2"]),
    "KubeflowEnvironment": (KUBEFLOW, ["devices=1", "num_nodes=2"]),  # a pod is a node
}
NAMES = {name for environment, _ in LAUNCHERS.values() for name in environment}


@pytest.fixture(params=LAUNCHERS)
def started_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in LAUNCHERS[request.param][0].items():
        monkeypatch.setenv(name, value)
    return request.param


def test_the_command_and_a_trainer_start_nothing_in_a_rank(
    started_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def configured(*overrides: str) -> Any:
        words = ["strategy=ddp", "accelerator=cpu", f"log_dir={tmp_path}", *LAUNCHERS[started_by][1], *overrides]
        return prepare(compose(words))

    ran: list[Any] = []
    monkeypatch.setattr(launch.Run, "execute", lambda run: ran.append(run.cfg))
    monkeypatch.setattr(launch, "launch_workers", lambda *_: pytest.fail("workers were started by a worker"))
    cfg = configured()
    launch.launch(cfg)
    assert ran == [cfg]
    with pytest.raises(ConfigError, match=r"The launcher started 2 processes, but the strategy needs [36]"):
        launch.launch(configured("devices=3"))
    kubeflow = started_by == "KubeflowEnvironment"
    trainer = quiet_trainer(DDPStrategy(), 1 if kubeflow else 2, num_nodes=2 if kubeflow else 1)
    assert type(trainer.strategy.cluster_environment).__name__ == started_by
    assert trainer.strategy.launcher is None
    assert (trainer.global_rank, trainer.local_rank, trainer.world_size) == (1, 0 if kubeflow else 1, 2)


@pytest.mark.parametrize("environment", [{}, {**SLURM, "SLURM_JOB_NAME": "bash"}], ids=["shell", "interactive"])
def test_an_interactive_allocation_and_a_plain_shell_are_no_ranks(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert detect_launcher() is None
    assert quiet_trainer(DDPStrategy(), 2).strategy.launcher is not None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


SECRETS = [("a", "b"), ("a", "a"), *(pytest.param(*two, marks=pytest.mark.slow) for two in (("a", ""), ("", "b")))]


@pytest.mark.parametrize(("first", "second"), SECRETS)
def test_two_pods_are_one_run_and_a_secret_that_differs_is_named_on_both_at_once(
    first: str, second: str, tmp_path: Path
) -> None:
    # It was never named, and both waited for values that they could not believe until a timeout.
    common = {**KUBEFLOW, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ("devices=1", "num_nodes=2", "strategy.timeout_s=600", f"log_dir={tmp_path}", "trainer.max_steps=2")
    with ExitStack() as stack:
        runs: list[Run] = []
        for rank, secret in enumerate((first, second)):
            (own := tmp_path / str(rank)).mkdir()
            env = {**common, "RANK": str(rank), "EVENER_SECRET": secret}
            runs.append(stack.enter_context(running(own, *words, env=env)))
        for run in runs:
            assert run.wait(120) == (first != second), run.output.read_text()
            said = run.output.read_text()
            assert ("Error: EVENER_SECRET is " in said) == (first != second)
            assert ("Set it to the same text on all machines, or on none." in said) == (first != second)
            assert "Traceback" not in said
    steps = [(0, 0), (0, 1), (1, 0), (1, 1)] if first == second else []
    assert sorted((rank, step) for rank, _, step in runs[0].lines()) == steps
    assert len(list(tmp_path.glob("*/*/*/result.json"))) == 1
