"""Run the command line: compose the configuration with Hydra, run it, report user errors in one sentence.

torch and Lightning take seconds to import, and composing needs neither: `--help`, `--cfg job`, tab completion and a
misspelt key are answered without them.
"""

import argparse
import gc
import os
import re
import signal
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig

from ..config.group_files import PACKAGE, Source
from ..launch.environment import WorkerError, environment
from ._composition import composition_sentence
from ._help import show_help
from .sweep_table import show_unfinished

if TYPE_CHECKING:
    from pytorch_lightning.plugins.environments import ClusterEnvironment

only_check = False
"""Whether to check the configuration without running it: `evener config validate`."""

CONFIG_PACKAGE = "pkg://evener.conf"
FULL_ERROR = "HYDRA_FULL_ERROR"

LAUNCHER_VARIABLES = (
    "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "SLURM_", "OMPI_", "PMI", "MPI", "KUBERNETES_",
)  # fmt: skip
"""How the names of environment variables begin that launchers set."""


def main(config_dir: str | Path | None = None, config_name: str = "train") -> None:
    """Run the command line of `train.py`.

    Args:
        config_dir: a project's own configuration directory, relative to its script; its root configuration lists
            `pkg://evener.conf` under `hydra.searchpath` to build on the groups here (see `examples/user_project`).
            None uses the configuration of this package.
        config_name: the root configuration.
    """
    gc.disable()  # imports make no garbage, and searching it takes a fifth of their time
    replace_former_words()
    script_dir = Path(getattr(sys.modules["__main__"], "__file__", None) or ".").absolute().parent
    source = Source(None if config_dir is None else str(script_dir / config_dir), config_name, added_folders())
    wants_traceback = os.environ.get(FULL_ERROR, "0") == "1"
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a `_target_` next to the configuration is importable, however we were started
    try:
        if {"--help", "-h"} & set(sys.argv[1:]):
            show_help(source, overrides())
        elif "--version" in sys.argv[1:]:
            sys.stdout.write(f"evener {version('evener')}\n")
        else:
            run(source, config_name, wants_traceback)
    except Exception as exc:
        show_unfinished()
        if wants_traceback:
            if isinstance(exc, WorkerError):
                sys.stderr.write(exc.trace)
            raise
        sys.exit(explain(exc, source))
    except KeyboardInterrupt:  # a second Ctrl-C, while the first one ends the run
        if wants_traceback:
            raise
        sys.exit(128 + signal.SIGINT)
    finally:
        gc.enable()


def replace_former_words() -> None:
    """Take out of the command line what others put there, and bring former names of options up to date."""
    # of `python -m torch.distributed.launch`, which also sets LOCAL_RANK
    words = [word for word in sys.argv[1:] if not word.startswith(("--local-rank=", "--local_rank="))]
    # a keyword of Python
    sys.argv[1:] = [re.sub(r"^(\+*checkpoint)\.async=", r"\1.background=", word) for word in words]


def run(source: Source, config_name: str, wants_traceback: bool) -> None:
    """Have Hydra compose the configuration, and run it, perhaps as one of a launcher's processes."""

    def job(cfg: DictConfig) -> float | None:
        from ...strategies.distributed.process_exit import freeze_for_good
        from .job import check_reported, run_reported

        freeze_for_good()
        gc.enable()
        return check_reported(cfg) if only_check else run_reported(cfg, wants_traceback)

    def run_hydra() -> None:
        path = source.config_dir or CONFIG_PACKAGE
        with environment({FULL_ERROR: "1"}):  # Hydra re-raises exceptions, which are reported in one sentence here
            hydra.main(version_base="1.3", config_path=path, config_name=config_name)(job)()

    if (started_by := launcher()) is None:
        run_hydra()
    else:
        from .job import run_under

        gc.enable()
        run_under(started_by, run_hydra)


def launcher() -> "ClusterEnvironment | None":
    """Detect the launcher that started this process as one of several; None if there is none."""
    if not any(name.startswith(LAUNCHER_VARIABLES) for name in os.environ):
        return None
    from ..launch import cluster

    return cluster.detect()


def overrides() -> list[str]:
    """The words of the command line that are overrides, not flags."""
    return [word for word in sys.argv[1:] if "=" in word and not word.startswith("--")]


def added_folders() -> tuple[str, ...]:
    """The directory that `--config-dir` names, which Hydra adds to its search path."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    given: str | None = parser.parse_known_args()[0].config_dir
    return () if given is None else (str(Path(given).absolute()),)


def explain(exc: Exception, source: Source = PACKAGE) -> str:
    """Describe a user error in one sentence, and any other exception by the user's frames."""
    if sentence := composition_sentence(exc, source, overrides()):
        return f"Error: {sentence}"
    from .job import job_sentence

    return f"Error: {job_sentence(exc)}"
