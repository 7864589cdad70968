"""Share rank 0's configuration with the other ranks under a launcher (torchrun, SLURM, MPI, Kubeflow).

Every rank gets the same resolved configuration and run directory, in every job of a sweep. Hydra runs only on rank 0,
and a restarted run continues in its previous directory.

Machines may join and leave a run: `torchrun --nnodes=1:4 ... train.py num_nodes=1:4`. torch's agents stop all workers
then, and start them anew with the machines that are there. To the workers that is another run, so here it becomes the
same one: its directory is named after the rendezvous, and it goes on from the newest checkpoint in it.
"""

import os
import re
import time
from collections.abc import Sequence
from typing import cast

from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.plugins.environments import ClusterEnvironment, TorchElasticEnvironment
from torch.distributed import DistNetworkError, PrefixStore, Store

from ...strategies import ConfigError
from ...strategies.distributed.store import (
    RankError,
    base_store,
    is_hosted_by_agent,
    leave_store,
    root_store,
    silence,
)

START_TIMEOUT_S = 1800.0
"""Seconds that a rank waits for the rendezvous store."""

POLL_S = 0.05

_num_jobs = 0


def publish(cluster: ClusterEnvironment, cfg: DictConfig) -> None:
    """Send a job's resolved configuration to the other ranks."""
    global _num_jobs
    if cluster.world_size() > 1:
        _jobs(cluster).set(f"job/{_num_jobs}", OmegaConf.to_yaml(cfg, resolve=True))
        if _num_jobs == 0:
            _runs(cluster).set("run_dir", str(cfg.run_dir))
        _num_jobs += 1


def receive(cluster: ClusterEnvironment) -> DictConfig | None:
    """Wait for the next job's configuration; None if there are no more jobs, a RankError if rank 0 has exited."""
    global _num_jobs
    store = _jobs(cluster)
    try:
        while not store.check([f"job/{_num_jobs}"]):
            time.sleep(POLL_S)
        text = store.get(f"job/{_num_jobs}").decode()
    except DistNetworkError as exc:
        gone = "rank 0 exited before it sent the configuration. See its output."
        raise RankError(silence(exc) or gone) from exc
    _num_jobs += 1
    if not text:
        return None
    return cast("DictConfig", OmegaConf.create(text))


def leave(cluster: ClusterEnvironment) -> None:
    """Say that there are no more jobs (rank 0), or that this rank needs the store no longer; a rank's last call."""
    if cluster.world_size() > 1:
        if cluster.global_rank() == 0:
            _jobs(cluster).set(f"job/{_num_jobs}", "")
        leave_store()


def _jobs(cluster: ClusterEnvironment) -> Store:
    """What rank 0 hands out, of this attempt."""
    return PrefixStore("jobs", root_store(cluster, START_TIMEOUT_S))


def earlier_run_dir(cluster: ClusterEnvironment) -> str | None:
    """The directory of this run before it was restarted; None at its first start."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return None
    runs = _runs(cluster)
    return runs.get("run_dir").decode() if runs.check(["run_dir"]) else None


def _runs(cluster: ClusterEnvironment) -> Store:
    """The entries that survive a restart if the launcher hosts the store."""
    return PrefixStore("evener/runs", base_store(cluster, START_TIMEOUT_S))


_RANGE = re.compile(r"num_nodes=['\"]?(\d+):(\d+)['\"]?")
_DIRECTORY = "${log_dir}/${name}/${hydra:runtime.choices.strategy}"


def resolved_words(words: Sequence[str], cluster: ClusterEnvironment) -> list[str]:
    """Replace a range of machines by their present number, the run's directory and `resume=auto`."""
    found = next((match for match in map(_RANGE.fullmatch, words) if match), None)
    if found is None:
        return list(words)
    least, most = map(int, found.groups())
    num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if not isinstance(cluster, TorchElasticEnvironment):
        raise ConfigError(
            f"{found[0]} needs torchrun, whose agents start the workers anew. Give one number, or use it."
        )
    if not least <= num_nodes <= most:
        raise ConfigError(
            f"{found[0]} allows {least} to {most} machines; torchrun has started {num_nodes}. Give torchrun the "
            f"same range: --nnodes={least}:{most}."
        )
    if is_hosted_by_agent():
        raise ConfigError(
            f"{found[0]} needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun on every machine: "
            "torch's shared store keeps the addresses of ranks that have left, and those that join wait for them."
        )
    if given := [word for word in words if word.startswith("resume=")]:
        raise ConfigError(
            f"{found[0]} continues from its own checkpoints, so it can't start from {given[0]}. Leave resume out."
        )
    kept = [f"num_nodes={num_nodes}" if word == found[0] else word for word in words]
    if not any(word.startswith("hydra.run.dir=") for word in words):
        run_id = re.sub(r"[^A-Za-z0-9_-]+", "_", os.environ.get("TORCHELASTIC_RUN_ID", "none"))
        kept.append(f"hydra.run.dir={_DIRECTORY}/{run_id}")
    return [*kept, "resume=auto"]
