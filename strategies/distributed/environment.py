"""Detect cluster environments that Lightning does not detect."""

import os

from lightning_fabric.plugins.environments import (
    ClusterEnvironment,
    KubeflowEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

KUBEFLOW = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
"""Environment variables of Kubeflow's PyTorchJob, which starts one process per pod."""


def kubeflow() -> ClusterEnvironment | None:
    """Return Kubeflow's environment, which Lightning does not detect; None elsewhere."""
    elsewhere = TorchElasticEnvironment.detect() or SLURMEnvironment.detect() or "LOCAL_RANK" in os.environ
    return KubeflowEnvironment() if not elsewhere and all(name in os.environ for name in KUBEFLOW) else None
