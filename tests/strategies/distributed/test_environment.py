"""Variables that a shell or a job has left: a run that would wait for nobody is refused at once, by their names."""

import os
import socket
from contextlib import nullcontext

import pytest
from lightning_fabric.plugins.environments import LightningEnvironment, SLURMEnvironment

from evener.strategies import ConfigError
from evener.strategies.distributed.environment import verify_started

ELSEWHERE = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"}
"""An address that nobody has (RFC 5737)."""
OF_TORCHRUN = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}  # both ranks are here
SLURM = {
    "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_NODELIST": "localhost",
}  # fmt: skip
BATCH_STEP = str(0xFFFFFFFB)

NOT_HERE = r"MASTER_ADDR=192.0.2.1 is no address of this machine.*Unset MASTER_ADDR"
NO_SRUN = r"SLURM_NTASKS=2 is set, but srun has not started.*unset SLURM_NTASKS"


@pytest.mark.parametrize(
    ("variables", "nodes", "refused"),
    [
        ({"LOCAL_RANK": "0"}, [1], r"LOCAL_RANK=0 is set.*taken for one of 2.*Unset LOCAL_RANK"),
        ({"EVENER_SECRET": "a"}, [1], "EVENER_SECRET is set, but ranks no longer sign"),
        (ELSEWHERE, [1], NOT_HERE),
        (ELSEWHERE | OF_TORCHRUN, [], NOT_HERE),
        (ELSEWHERE, [2], ""),
        *(({"MASTER_ADDR": address}, [1], "") for address in ("localhost", "0.0.0.0", socket.gethostname())),
        (SLURM, [1], NO_SRUN),
        ({**SLURM, "SLURM_STEP_ID": BATCH_STEP}, [1], NO_SRUN),
        ({**SLURM, "SLURM_STEP_ID": "0"}, [1], ""),
    ],
)
def test_variables_by_which_a_run_would_wait_for_nobody_are_refused(
    variables: dict[str, str], nodes: list[int], refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", *OF_TORCHRUN):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment = SLURMEnvironment(auto_requeue=False) if "SLURM_NTASKS" in variables else LightningEnvironment()
    environment.set_world_size(2)
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        verify_started(environment, *nodes)
