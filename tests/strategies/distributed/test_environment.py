"""Variables that a shell or a job has left: a run that would wait for nobody is refused at once, by their names."""

import os
import socket

import pytest
from lightning_fabric.plugins.environments import ClusterEnvironment, LightningEnvironment, SLURMEnvironment

from evener.strategies import ConfigError
from evener.strategies.distributed.environment import verify_started

ELSEWHERE = "192.0.2.1"
"""An address that nobody has (RFC 5737)."""

SLURM = {
    "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_NODELIST": "localhost",
}  # fmt: skip


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def of_two(environment: ClusterEnvironment) -> ClusterEnvironment:
    environment.set_world_size(2)
    return environment


def test_a_local_rank_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match=r"LOCAL_RANK=0 is set.*taken for one of 2.*Unset LOCAL_RANK"):
        verify_started(of_two(LightningEnvironment()), 1)


def test_an_address_of_another_machine_is_refused_on_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", ELSEWHERE)
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ConfigError, match=rf"MASTER_ADDR={ELSEWHERE} is no address of this machine.*Unset MASTER_ADDR"):
        verify_started(of_two(LightningEnvironment()), 1)
    verify_started(of_two(LightningEnvironment()), 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # torchrun says that both ranks are here
    with pytest.raises(ConfigError, match="Unset MASTER_ADDR"):
        verify_started(of_two(LightningEnvironment()))


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "0.0.0.0", socket.gethostname()])
def test_addresses_of_this_machine_are_taken(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", address)
    verify_started(of_two(LightningEnvironment()), 1)


@pytest.mark.parametrize("step", [None, str(0xFFFFFFFB)], ids=["no step", "the batch script's step"])
def test_a_batch_script_without_srun_is_refused(step: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SLURM, **({} if step is None else {"SLURM_STEP_ID": step})}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"SLURM_NTASKS=2 is set, but srun has not started.*unset SLURM_NTASKS"):
        verify_started(SLURMEnvironment(auto_requeue=False), 1)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    verify_started(SLURMEnvironment(auto_requeue=False), 1)
