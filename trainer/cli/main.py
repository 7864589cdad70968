"""Run the command line: compose the configuration with Hydra, run it, report user errors in one sentence.

torch and Lightning take seconds to import, and composing needs neither: `--help`, `--cfg job`, tab completion and a
misspelt key are answered without them.
"""

import atexit
import gc
import os
import re
import signal
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from ...strategies.core.errors import ConfigError
from ..config.composing import (
    CONFIG_MODULE,
    Source,
    composition_sentence,
    verify_all_read,
    verify_own_data,
    verify_plain,
)
from ..job.result import WorkerError
from ..launch.cluster import detect_launcher, environment
from ..study.sweep import show_unfinished

FULL_ERROR = "HYDRA_FULL_ERROR"
"""Hydra's variable by which errors are raised as they are."""

FORMER = {
    r"^(\+*)ckpt_path=": "resume=",  # lightning-hydra-template's
    r"^(\+*checkpoint)\.async=": r"\1.background=",  # a keyword of Python
    r"^(\+*strategy)\.verify_loss=": r"\1.verify=",
}
"""How options of earlier versions, and of others, are written now."""


class PackageGroups(SearchPathPlugin):
    """Has Hydra find, and `--help` list, this package's groups in every project."""

    @override
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("evener", f"pkg://{CONFIG_MODULE}")


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
    source = Source(None if config_dir is None else str(script_dir / config_dir), config_name)
    wants_traceback = os.environ.get(FULL_ERROR, "0") == "1"
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a `_target_` next to the configuration is importable, however we were started
    try:
        if "--version" in sys.argv[1:]:
            sys.stdout.write(f"evener {version('evener')}\n")
        else:
            run(source, wants_traceback)
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as exc:
        show_unfinished()
        if not wants_traceback:
            end(exc, source)
        sys.stderr.write(exc.trace if isinstance(exc, WorkerError) else "")
        raise
    except KeyboardInterrupt:  # a second Ctrl-C, while the first one ends the run
        if wants_traceback:
            raise
        sys.exit(128 + signal.SIGINT)
    finally:
        gc.enable()
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a Ctrl-C while Python ends leaves no traceback
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)


def replace_former_words() -> None:
    """Take out of the command line what others put there, put overrides last, and bring former names up to date."""
    # of `python -m torch.distributed.launch`, which also sets LOCAL_RANK
    words = [word for word in sys.argv[1:] if not word.startswith(("--local-rank=", "--local_rank="))]
    words.sort(key=is_override)  # argparse refuses `a=1 -m b=2`, options between other words
    for former, now in FORMER.items():
        words = [re.sub(former, now, word) for word in words]
    sys.argv[1:] = words


def run(source: Source, wants_traceback: bool) -> None:
    """Have Hydra compose the configuration, and run it, perhaps as one of a launcher's processes."""

    def job(cfg: DictConfig) -> float | None:
        hydra_cfg = HydraConfig.get()
        in_sweep = hydra_cfg.mode is RunMode.MULTIRUN
        try:  # before torch is imported, which takes most of the time of a refusal
            verify_plain(cfg)
            verify_all_read(cfg, OmegaConf.to_yaml(hydra_cfg))
            if not OmegaConf.is_missing(cfg.module, "_target_"):
                verify_own_data(hydra_cfg.runtime.choices, hydra_cfg.overrides.task)
            from .train import run_job

            if not gc.isenabled():  # the first job of a sweep: what later ones leave is to be collected
                gc.freeze()
                gc.enable()
            return run_job(cfg, in_sweep)
        except Exception as exc:
            if in_sweep or wants_traceback:  # Hydra reports which job of a sweep failed
                raise
            end(exc, source)

    def run_hydra() -> None:
        Plugins.instance().register(PackageGroups)
        path = source.config_dir or f"pkg://{CONFIG_MODULE}"
        # Hydra re-raises exceptions, which are reported in one sentence here
        with environment({FULL_ERROR: "1"}):
            hydra.main(version_base="1.3", config_path=path, config_name=source.config_name)(job)()

    sys.argv += source.named(overrides())[len(overrides()) :]
    if (started_by := detect_launcher()) is None:
        run_hydra()
    else:
        from .train import run_under

        gc.enable()
        run_under(started_by, run_hydra)


def end(exc: Exception, source: Source) -> NoReturn:
    """End the command: a user error is one sentence, and of any other exception the user's frames are shown."""
    sentence = str(exc) if isinstance(exc, (ConfigError, WorkerError)) else None
    sentence = sentence or composition_sentence(exc, source, overrides())
    if sentence is None:
        from ..job.log_file import error_sentence

        sentence = error_sentence(exc)
    if (status := exc.status if isinstance(exc, WorkerError) else 1) == 1:
        sys.exit(f"Error: {sentence}")
    sys.stderr.write(f"Error: {sentence}\n")
    sys.exit(status)


def overrides() -> list[str]:
    """The words of the command line that are overrides, not flags."""
    return list(filter(is_override, sys.argv[1:]))


def is_override(word: str) -> bool:
    """Whether a word of the command line is an override, such as `a=1` or `~a`."""
    return not word.startswith("-") and ("=" in word or word.startswith("~"))
