"""Variables that a shell or a job has left: a run that would wait for nobody is refused at once, by their names."""

import os
from contextlib import nullcontext

import pytest
from lightning_fabric.plugins.environments import LightningEnvironment, SLURMEnvironment

from evener.strategies import ConfigError
from evener.strategies.distributed.environment import verify_started

SLURM = {
    "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_NODELIST": "localhost",
}  # fmt: skip
BATCH_STEP = str(0xFFFFFFFB)

NO_SRUN = r"SLURM_NTASKS=2 is set, but srun has not started.*unset SLURM_NTASKS"


@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({"LOCAL_RANK": "0"}, r"LOCAL_RANK=0 is set.*taken for one of 2.*Unset LOCAL_RANK"),
        ({"EVENER_SECRET": "a"}, "EVENER_SECRET is set, but ranks no longer sign"),
        (SLURM, NO_SRUN),
        ({**SLURM, "SLURM_STEP_ID": BATCH_STEP}, NO_SRUN),
        ({**SLURM, "SLURM_STEP_ID": "0"}, ""),
    ],
)
def test_variables_by_which_a_run_would_wait_for_nobody_are_refused(
    variables: dict[str, str], refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment = SLURMEnvironment(auto_requeue=False) if "SLURM_NTASKS" in variables else LightningEnvironment()
    environment.set_world_size(2)
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        verify_started(environment)
