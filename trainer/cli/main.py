"""Run the command line: compose the configuration with Hydra, run it, report user errors in one sentence.

torch and Lightning take seconds to import, and composing needs neither: `--help`, `--cfg job`, tab completion and a
misspelt key are answered without them.
"""

import argparse
import atexit
import gc
import io
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core import utils as hydra_utils
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ...strategies.core.errors import ConfigError
from ..config.group_files import Source
from ..config.plain_values import verify_all_read, verify_own_data, verify_plain
from ..job.result import WorkerError
from ..launch.environment import LOCK_FILE, detect_launcher, environment, locked
from ..study.sweep import show_unfinished
from ._help import composition_sentence, show_help

logger = logging.getLogger(__name__)

only_check = False
"""Whether to check the configuration without running it: `evener config validate`."""

CONFIG_PACKAGE = "pkg://evener.conf"
FULL_ERROR = "HYDRA_FULL_ERROR"


def main(config_dir: str | Path | None = None, config_name: str = "train") -> None:
    """Run the command line of `train.py`.

    Args:
        config_dir: a project's own configuration directory, relative to its script; its root configuration lists
            `pkg://evener.conf` under `hydra.searchpath` to build on the groups here (see `examples/user_project`).
            None uses the configuration of this package.
        config_name: the root configuration.
    """
    for stream in (sys.stdout, sys.stderr):
        outlive_reader(stream)
    gc.disable()  # imports make no garbage, and searching it takes a fifth of their time
    replace_former_words()
    script_dir = Path(getattr(sys.modules["__main__"], "__file__", None) or ".").absolute().parent
    source = Source(None if config_dir is None else str(script_dir / config_dir), config_name, added_folders())
    if strange := [word for word in sys.argv[1:] if any("\ud800" <= letter <= "\udfff" for letter in word)]:
        sys.exit(f"Error: {strange[0]!a} is not UTF-8, so that no log could name it. Give another name.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a `_target_` next to the configuration is importable, however we were started
    try:
        if {"--help", "-h"} & set(sys.argv[1:]):
            show_help(source, overrides())
        elif "--version" in sys.argv[1:]:
            sys.stdout.write(f"evener {version('evener')}\n")
        else:
            run(source, config_name)
    except Exception as exc:
        show_unfinished()
        if wants_traceback():
            if isinstance(exc, WorkerError):
                sys.stderr.write(exc.trace)
            raise
        end(exc, source)
    except KeyboardInterrupt:  # a second Ctrl-C, while the first one ends the run
        if wants_traceback():
            raise
        sys.exit(128 + signal.SIGINT)
    finally:
        gc.enable()
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a Ctrl-C while Python ends leaves no traceback
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)


def outlive_reader(stream: Any) -> None:
    """Have a run go on when nobody reads its output any more (`| head`), or the disk that it goes to is full.

    The log has it all. What is no Unicode, such as the name of a file, is written escaped.
    """
    if not isinstance(stream, io.TextIOWrapper):
        return
    stream.reconfigure(errors="backslashreplace")

    def lenient(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            try:
                return own(*args)
            except OSError as exc:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
                if logging.getLogger().handlers:
                    logger.warning("The output can't be written any more (%s); the run goes on.", exc.strerror)
                return len(args[0]) if args else None

        return call

    for name in ("write", "flush"):
        setattr(stream, name, lenient(getattr(stream, name)))


FORMER = {
    r"^(\+*)ckpt_path=": "resume=",  # lightning-hydra-template's
    r"^(\+*checkpoint)\.async=": r"\1.background=",  # a keyword of Python
    r"^(\+*strategy)\.verify_loss=": r"\1.verify=",
}
"""How options of earlier versions, and of others, are written now."""


def replace_former_words() -> None:
    """Take out of the command line what others put there, put overrides last, and bring former names up to date."""
    # of `python -m torch.distributed.launch`, which also sets LOCAL_RANK
    words = [word for word in sys.argv[1:] if not word.startswith(("--local-rank=", "--local_rank="))]
    words.sort(key=is_override)  # argparse refuses `a=1 -m b=2`, options between other words
    for former, now in FORMER.items():
        words = [re.sub(former, now, word) for word in words]
    sys.argv[1:] = words


def run(source: Source, config_name: str) -> None:
    """Have Hydra compose the configuration, and run it, perhaps as one of a launcher's processes."""
    reraises = wants_traceback()  # as asked, before Hydra is

    def job(cfg: DictConfig) -> float | None:
        try:  # before torch is imported, which takes most of the time of a refusal
            hydra_cfg = HydraConfig.get()
            verify_plain(cfg)
            verify_all_read(cfg, OmegaConf.to_yaml(hydra_cfg))
            if not OmegaConf.is_missing(cfg.module, "_target_"):
                verify_own_data(hydra_cfg.runtime.choices, hydra_cfg.overrides.task)
            from .train import run_job

            if not gc.isenabled():  # the first job of a sweep: what later ones leave is to be collected
                gc.freeze()
                gc.enable()
            return run_job(cfg, only_check, in_sweep())
        except Exception as exc:
            if in_sweep():  # of which Hydra reports which job failed
                raise
            if not only_check:
                discard_empty(Path(str(cfg.get("run_dir"))), Path(str(cfg.get("log_dir"))))
            if reraises:
                raise
            end(exc, source)

    def run_hydra() -> None:
        path = source.config_dir or CONFIG_PACKAGE
        # Hydra re-raises exceptions, which are reported in one sentence here
        with environment({FULL_ERROR: "1"}), locks_before_saving():
            hydra.main(version_base="1.3", config_path=path, config_name=config_name)(job)()

    sys.argv += source.named(overrides())[len(overrides()) :]
    if (started_by := detect_launcher()) is None:
        run_hydra()
    else:
        from .train import run_under

        gc.enable()
        run_under(started_by, run_hydra)


@contextmanager
def locks_before_saving() -> Generator[None]:
    """Have Hydra write `.hydra/` into a directory that no other command has, until this one ends."""
    configure = hydra_utils.configure_log  # the last that Hydra calls before it writes

    def lock_and_configure(*args: Any) -> None:
        # of a job; that of a sweep has no directory
        if HydraConfig.initialized() and not OmegaConf.is_missing(HydraConfig.get().runtime, "output_dir"):
            locks.enter_context(locked(Path(HydraConfig.get().runtime.output_dir)))
        configure(*args)

    with ExitStack() as locks:
        locks.callback(setattr, hydra_utils, "configure_log", configure)
        hydra_utils.configure_log = lock_and_configure
        yield


def wants_traceback() -> bool:
    """Whether errors are to be raised as they are."""
    return os.environ.get(FULL_ERROR, "0") == "1"


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


def discard_empty(run_dir: Path, log_dir: Path) -> None:
    """Remove the directory of a run that never started, which holds only what Hydra wrote, and its empty parents."""
    if {path.name for path in run_dir.glob("*")} - {LOCK_FILE} != {".hydra"}:
        return
    shutil.rmtree(run_dir / ".hydra")
    (run_dir / LOCK_FILE).unlink(missing_ok=True)
    above = [run_dir, *run_dir.parents]
    for folder in above[: above.index(log_dir.absolute()) + 1 if log_dir.absolute() in above else 1]:
        with suppress(OSError):  # not empty
            folder.rmdir()


def in_sweep() -> bool:
    """Whether this is a job of a multirun."""
    return HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN


def overrides() -> list[str]:
    """The words of the command line that are overrides, not flags."""
    return list(filter(is_override, sys.argv[1:]))


def is_override(word: str) -> bool:
    """Whether a word of the command line is an override, such as `a=1` or `~a`."""
    return not word.startswith("-") and ("=" in word or word.startswith("~"))


def added_folders() -> tuple[str, ...]:
    """The directory that `--config-dir` names, which Hydra adds to its search path."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    given: str | None = parser.parse_known_args()[0].config_dir
    return () if given is None else (str(Path(given).absolute()),)
