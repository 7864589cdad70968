"""Find out who started this process, set environment variables of workers, and lock the run directory."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ...strategies.core.errors import ConfigError

if TYPE_CHECKING:
    from pytorch_lightning.plugins.environments import ClusterEnvironment

LAUNCHER_VARIABLES = (
    "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "SLURM_", "OMPI_", "PMI", "MPI",
)  # fmt: skip
"""How the names of environment variables begin that launchers set; Kubernetes sets its own in every pod."""


def detect_launcher() -> "ClusterEnvironment | None":
    """Detect the launcher that started this process as one of several; None if there is none."""
    if not any(name.startswith(LAUNCHER_VARIABLES) for name in os.environ):
        return None
    from pytorch_lightning.plugins import environments  # slow to import

    from ...strategies.distributed.environment import kubeflow

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


LOCK_FILE = ".lock"
"""The file in a run directory that says who uses it."""

_HELD = set[Path]()
"""The directories that this process has."""


@contextmanager
def locked(run_dir: Path) -> Generator[None]:
    """Have the run directory to oneself inside the block. The system releases it with the process, however that ends.

    Raises:
        ConfigError: another command has it.
    """
    path = run_dir.absolute() / LOCK_FILE
    if path in _HELD:
        yield
        return
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno in (errno.EACCES, errno.EAGAIN):
                file.seek(0)
                raise ConfigError(
                    f"run_dir={run_dir} is in use by {file.read() or 'another command'}. Wait for its end, or give "
                    "another directory (hydra.run.dir)."
                ) from exc
            # a file system without locks
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        file.flush()
        _HELD.add(path)
        try:
            yield
        finally:
            _HELD.remove(path)
            path.unlink(missing_ok=True)
