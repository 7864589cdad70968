"""Under torchrun, SLURM or Kubeflow a process is a rank already: it is recognised, and nothing is started twice."""

from pathlib import Path
from typing import Any

import pytest
from regression import quiet_trainer
from surroundings import SLURM_JOB

from evener.strategies import ConfigError, DDPStrategy
from evener.trainer import compose
from evener.trainer.cli.train import prepare
from evener.trainer.launch import launcher as launch
from evener.trainer.launch.cluster import detect_launcher

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "7", "RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "0", "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511",
}  # fmt: skip
SLURM = {**SLURM_JOB, "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
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
