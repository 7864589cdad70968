"""Find out who started this process, and share rank 0's configuration with the other ranks under a launcher.

Hydra runs only on rank 0. Where machines join or leave (`torchrun --nnodes=1:4 ... train.py num_nodes=1:4`), torch's
agents start all workers anew, which go on as one run: its directory is named after the rendezvous.
"""

import os
import re
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf

from ...strategies.core.errors import ConfigError

if TYPE_CHECKING:  # what needs torch is imported where a launcher has been found
    from pytorch_lightning.plugins.environments import ClusterEnvironment

LAUNCHER_VARIABLES = (
    "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "SLURM_", "OMPI_", "PMI", "MPI",
)  # fmt: skip
"""How the names of environment variables begin that launchers set; Kubernetes sets its own in every pod."""

START_TIMEOUT_S = 1800.0
"""Seconds that a rank waits for the rendezvous store."""

POLL_S = 0.05

_num_jobs = 0


def detect_launcher() -> "ClusterEnvironment | None":
    """Detect the launcher that started this process as one of several; None if there is none."""
    if not any(name.startswith(LAUNCHER_VARIABLES) for name in os.environ):
        return None
    from pytorch_lightning.plugins import environments

    from ...strategies.distributed.store import kubeflow

    kinds = (environments.TorchElasticEnvironment, environments.SLURMEnvironment, environments.MPIEnvironment)
    return next((kind() for kind in kinds if kind.detect()), None) or kubeflow()


@contextmanager
def environment(variables: Mapping[str, str]) -> Generator[None]:
    """Set environment variables inside the block."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


def _jobs(cluster: "ClusterEnvironment", of_all_attempts: bool = False) -> Any:
    """What rank 0 hands out, of this attempt; or what survives a restart if the launcher hosts the store."""
    from ...strategies.distributed import store

    open_store, name = (store.base_store, "evener/runs") if of_all_attempts else (store.root_store, "jobs")
    return store.PrefixStore(name, open_store(cluster, START_TIMEOUT_S))


def publish(cluster: "ClusterEnvironment", cfg: DictConfig) -> None:
    """Send a job's resolved configuration to the other ranks."""
    global _num_jobs
    if cluster.world_size() > 1:
        _jobs(cluster).set(f"job/{_num_jobs}", OmegaConf.to_yaml(cfg, resolve=True))
        if _num_jobs == 0:
            _jobs(cluster, of_all_attempts=True).set("run_dir", str(cfg.run_dir))
        _num_jobs += 1


def receive(cluster: "ClusterEnvironment") -> DictConfig | None:
    """Wait for the next job's configuration; None if there are no more jobs, a RankError if rank 0 has exited."""
    from torch.distributed import DistNetworkError

    from ...strategies.distributed.store import RankError, silence

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
    return cast("DictConfig", OmegaConf.create(text)) if text else None


def leave(cluster: "ClusterEnvironment") -> None:
    """Say that there are no more jobs (rank 0), or that this rank needs the store no longer; a rank's last call."""
    from ...strategies.distributed.store import leave_store

    if cluster.world_size() > 1:
        if cluster.global_rank() == 0:
            _jobs(cluster).set(f"job/{_num_jobs}", "")
        leave_store()


def words_of_rank_0(words: Sequence[str], cluster: "ClusterEnvironment") -> list[str]:
    """The command line, of a run that was restarted with its directory."""
    words = resolved_words(words, cluster)
    is_restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if is_restarted and (runs := _jobs(cluster, of_all_attempts=True)).check(["run_dir"]):
        words.append(f"hydra.run.dir={runs.get('run_dir').decode()}")
    return words


def resolved_words(words: Sequence[str], cluster: "ClusterEnvironment") -> list[str]:
    """Replace a range of machines by their present number, the run's directory and `resume=auto`."""
    from pytorch_lightning.plugins.environments import TorchElasticEnvironment

    from ...strategies.distributed.store import is_hosted_by_agent

    matches = (re.fullmatch(r"num_nodes=['\"]?(\d+):(\d+)['\"]?", word) for word in words)
    found = next(filter(None, matches), None)
    if found is None or not isinstance(cluster, TorchElasticEnvironment):  # others refuse a range as a number of nodes
        return list(words)
    least, most = map(int, found.groups())
    num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
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
        kept.append(f"hydra.run.dir=${{log_dir}}/${{name}}/${{hydra:runtime.choices.strategy}}/{run_id}")
    return [*kept, "resume=auto"]
