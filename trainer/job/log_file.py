"""Write one log file per run, `train.log`, with each line once whatever the number of processes, and what ends it.

A failure is told in the log, in `result.json`, and shortly on the console. SIGTERM, SIGINT, SIGHUP and SIGUSR1 end a
run between two steps, after writing a checkpoint.
"""

import errno
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytorch_lightning as pl
from omegaconf import DictConfig
from pytorch_lightning.utilities.exceptions import MisconfigurationException, SIGTERMException
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_only
from typing_extensions import override

from ...strategies import ConfigError
from ...strategies.core.files import is_library
from ...strategies.core.patching import LIGHTNING_TELLS, filtered, replaced
from ...strategies.distributed import survivors
from ...strategies.distributed.processes import handled
from ...strategies.distributed.wrapper import UNUSED
from ...strategies.registry import stop_signal_of
from ..checkpoint.file_io import find_newest
from ..config.checks import strategy_name
from .result import FAILED, Result, environment

LOG_FILE = "train.log"
FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"
ESCAPED = "backslashreplace"
"""How text is written that is no Unicode: names of files, and messages of errors with bytes of them."""
REDUNDANT = (
    "Tip:", "GPU available:", "TPU available:", "HPU available:", "`Trainer(val_check_interval=1.0)`", "global batch ",
)  # fmt: skip
"""Lightning's tips for other products, and lines that the start-up block replaces."""


LIGHTNING_LOGGERS = ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric", "lightning")


class ConsoleHandler(logging.Handler):
    """Write to the `sys.stdout` of the moment: a progress bar replaces it, to keep lines above itself."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stdout.write(f"{self.format(record)}\n")
            sys.stdout.flush()
        except Exception:  # noqa: BLE001  # as the handlers of `logging`
            self.handleError(record)


@contextmanager
def run_log(run_dir: str | Path, rank: int = 0) -> Generator[None]:
    """Send the log of this process to `train.log` and the console; of ranks above 0 only errors, to the console."""
    # `LogEveryEpoch` shortens the interval right after this warning
    warnings.filterwarnings("ignore", message="The number of training batches .* is smaller than the logging interval")
    # Lightning 2.6 uses a deprecated API of torch 2.13's pytree; users can't act on the warning
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*", category=FutureWarning)
    root = logging.getLogger()
    hydras = [handler for handler in root.handlers if getattr(handler, "stream", None) is sys.stdout]
    added: list[logging.Handler] = [ConsoleHandler()] if hydras or not root.handlers else []
    root.handlers[:] = [*(handler for handler in root.handlers if handler not in hydras), *added]

    def add_file() -> None:
        logging.disable(logging.NOTSET)
        if not any(isinstance(handler, logging.FileHandler) for handler in added):  # of a rank that was forked from 0
            added.append(logging.FileHandler(Path(run_dir) / LOG_FILE, encoding="utf-8", errors=ESCAPED))
            added[-1].setFormatter(logging.Formatter(FORMAT))
            root.addHandler(added[-1])

    if rank == 0:
        add_file()
    else:
        logging.disable(logging.WARNING)
    if survivors.own is not None:
        survivors.own.when_first.append(add_file)
    for logger in map(logging.getLogger, LIGHTNING_LOGGERS):
        logger.handlers.clear()
        logger.propagate = True
    # Lightning's own rank, which it has not declared; set before loggers are made: a forked worker has the parent's
    own_rank = replaced(rank_zero_only, "rank", rank)
    needed = filtered(LIGHTNING_TELLS, lambda record: not any(text in record.getMessage() for text in REDUNDANT))
    try:
        with own_rank, needed, replaced(root, "level", logging.INFO):
            yield
    finally:
        logging.disable(logging.NOTSET)
        for handler in added:
            root.removeHandler(handler)
            handler.close()
        root.handlers += hydras


def report(
    cfg: DictConfig, rank: int, num_processes: int, cause: BaseException | str, num_restarts: int | None = None
) -> tuple[Result, bool]:
    """Write a rank's failure (or how it was killed) to `train.log`, a first one also to `result.json`; and if it is."""
    if num_restarts is None:
        num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    told: dict[str, Any] = {"reason": cause} if isinstance(cause, str) else described(cause)
    failed = Result(
        cfg.mode, strategy_name(cfg), [], num_processes, cfg.run_dir, monitor=cfg.monitor, status=FAILED,
        failed_rank=rank, failed_at=time.strftime("%Y-%m-%d %H:%M:%S"), num_restarts=num_restarts,
        environment=environment(()), **told,
    )  # fmt: skip
    is_first, first = True, None
    with suppress(OSError):  # a full disk must not hide the reason
        if isinstance(cause, str):
            failed.write()
        elif not failed.write_first():
            is_first, first = False, Result.of_failure(cfg.run_dir)
    text, whole = failed.told, failed.trace.rstrip()
    if is_first and whole not in ("", failed.frames):
        text = f"{text}\n\n{whole}"
    if first is None or first.reason != failed.reason:
        text = f"rank {rank} failed{'' if is_first else ' too'}: {text}"
        record = logging.makeLogRecord({"name": __name__, "levelname": "ERROR", "msg": text})
        # the log's own handlers write on rank 0 only
        with suppress(OSError), (Path(cfg.run_dir) / LOG_FILE).open("a", encoding="utf-8", errors=ESCAPED) as file:
            file.write(f"{logging.Formatter(FORMAT).format(record)}\n")
    return failed, is_first


def described(exc: BaseException) -> dict[str, Any]:
    """The fields of a failed result that an exception decides; of a KeyboardInterrupt Lightning makes a SystemExit."""
    if isinstance(exc, SystemExit) and isinstance(exc.__context__, KeyboardInterrupt):
        exc = exc.__context__
    if (sentence := sentence_of(exc)) is not None:
        return {"reason": sentence, "refused": isinstance(exc, (ConfigError, MisconfigurationException))}
    trace, lines = "".join(traceback.format_exception(exc)), traceback.format_exception_only(exc)
    reason = lines[-1 if isinstance(exc, SyntaxError) else 0].strip()  # the exception's name and text
    return {"reason": reason, "trace": trace, "frames": users_frames(exc, "train.log has them")}


def sentence_of(exc: BaseException) -> str | None:
    """The sentence for users that an error consists of; None for others, whose traceback is needed."""
    if isinstance(exc, (ConfigError, MisconfigurationException)) or UNUSED in str(exc):
        return str(exc)
    if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"The disk is full ({exc.strerror}); existing checkpoints are intact. Free some space, or set log_dir to "
            "another disk."
        )
    return None


def error_sentence(exc: Exception) -> str:
    """Describe a user error in one sentence, and any other exception by the user's frames."""
    if sentence := sentence_of(exc):
        return sentence
    frames = traceback.extract_tb(exc.__traceback__)
    if isinstance(exc, OSError) and exc.filename and all(is_library(frame.filename) for frame in frames):  # of a run
        return f"{exc.filename} can't be written ({exc.strerror}). Set log_dir to a writable directory."
    return users_frames(exc)


def users_frames(exc: BaseException, rest: str = "HYDRA_FULL_ERROR=1 shows them") -> str:
    """Format a traceback without the frames of libraries, which `rest` tells, but for the innermost if it is alone."""
    told = traceback.TracebackException.from_exception(exc, compact=True)
    parts = [told]
    for part in parts:  # which grows
        parts += filter(None, (part.__cause__, part.__context__))
    own = {id(part): [frame for frame in part.stack if not is_library(frame.filename)] for part in parts}
    if not any(own.values()):
        own[id(told)] = told.stack[-1:]
    left_out = sum(len(part.stack) - len(own[id(part)]) for part in parts)
    for part in parts:
        part.stack[:] = own[id(part)]
    text = "".join(told.format()).rstrip()
    return f"{text}\n({left_out} frames of libraries are left out; {rest}.)" if left_out else text


class Interrupted(SystemExit):
    """Exit by a signal, with 128 + its number; `told` says whether it was said that training had not `begun`."""

    def __init__(self, signum: int, begun: bool = True) -> None:
        super().__init__(128 + signum)
        self.signum, self.begun, self.told = signum, begun, False


@contextmanager
def graceful_stop(trainer: pl.Trainer | None = None) -> Generator[None]:
    """Let SIGINT, SIGHUP and SIGUSR1 stop training like SIGTERM; without a trainer the first one ends it at once."""

    def stop(at_once: bool, signum: int, frame: FrameType | None) -> None:
        if not at_once:
            if frame is None or trainer is None or not has_loop_begun(trainer):  # nothing is lost by ending at once
                raise Interrupted(signum, begun=trainer is not None and trainer.global_step > 0)
            trainer._signal_connector._sigterm_notifier_fn(signum, frame)
        elif trainer is not None and trainer.world_size == 1:
            raise Interrupted(signum)

    with handled(stop) as requests:
        try:
            yield
        except SIGTERMException as exc:
            told = None if trainer is None else stop_signal_of(trainer.strategy)
            raise Interrupted(requests.signum or told or signal.SIGTERM) from exc


def has_loop_begun(trainer: pl.Trainer) -> bool:
    """Whether the loop that would save and stop has begun."""
    by_step = trainer.fit_loop.epoch_loop.batch_progress.current.ready > 0  # Lightning's own trainer
    return trainer.state.fn == "fit" and bool(getattr(trainer.fit_loop, "takes_steps", by_step))


def tell_stop(exc: Interrupted) -> None:
    """Say of a run that a signal has ended before it had something to save that this is so."""
    if not exc.begun:
        rank_zero_info(f"Stopped by {signal.Signals(exc.signum).name} before the first step.")
        exc.told = True


def loss(run_dir: str) -> str:
    """Say what is lost of a run that was killed."""
    newest = find_newest(run_dir)
    if newest is None:
        return "nothing of this run was saved"
    return f"what was trained after its newest checkpoint, {newest}, is lost"
