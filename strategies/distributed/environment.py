"""Detect cluster environments that Lightning does not detect, refuse those that stale variables pretend, and count."""

import os

from lightning_fabric.plugins.environments import (
    ClusterEnvironment,
    KubeflowEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from ..core.errors import ConfigError

KUBEFLOW = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
"""Environment variables of Kubeflow's PyTorchJob, which starts one process per pod."""

_BATCH_STEP = str(0xFFFFFFFB)
"""What SLURM calls the step of a batch script itself."""


def kubeflow() -> ClusterEnvironment | None:
    """Return Kubeflow's environment, which Lightning does not detect; None elsewhere."""
    elsewhere = TorchElasticEnvironment.detect() or SLURMEnvironment.detect() or "LOCAL_RANK" in os.environ
    return KubeflowEnvironment() if not elsewhere and all(name in os.environ for name in KUBEFLOW) else None


def num_processes(num_devices: int, devices_per_process: int) -> int:
    """Count the processes of one node: its devices, in order, must divide into blocks of equal size."""
    if num_devices < 1 or num_devices % devices_per_process:
        raise ConfigError(
            f"{num_devices} devices don't divide into processes of {devices_per_process} devices. "
            f"Give a multiple of {devices_per_process} devices, or another number of devices per process."
        )
    return num_devices // devices_per_process


def verify_started(environment: ClusterEnvironment) -> None:
    """Refuse to wait for ranks that nobody has started, as variables left in a shell or a job would have it.

    Args:
        environment: how this process became a rank.

    Raises:
        ConfigError: the other ranks can't be there; the message names the variable.
    """
    num_ranks = environment.world_size()
    if num_ranks == 1:
        return
    if os.environ.get("EVENER_SECRET"):
        raise ConfigError("EVENER_SECRET is set, but ranks no longer sign what they write. Unset it.")
    by_hand = isinstance(environment, LightningEnvironment) and "LOCAL_RANK" in os.environ
    if by_hand and not all(name in os.environ for name in ("MASTER_ADDR", "MASTER_PORT")):
        raise ConfigError(
            f"LOCAL_RANK={os.environ['LOCAL_RANK']} is set, so this process is taken for one of {num_ranks} that were "
            "started elsewhere, but MASTER_ADDR and MASTER_PORT are not. Unset LOCAL_RANK, or start with torchrun."
        )
    steps = {os.environ.get(name, "") for name in ("SLURM_STEP_ID", "SLURM_STEPID")}
    if isinstance(environment, SLURMEnvironment) and steps <= {"", _BATCH_STEP}:
        raise ConfigError(
            f"SLURM_NTASKS={num_ranks} is set, but srun has not started this process, so the other tasks never join. "
            "Start it with srun; to run on this machine alone, unset SLURM_NTASKS."
        )
