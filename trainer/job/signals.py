"""Stop a run gracefully: SIGTERM, SIGINT, SIGHUP and SIGUSR1 end it between two steps, after writing a checkpoint."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

import pytorch_lightning as pl
from pytorch_lightning.utilities.exceptions import SIGTERMException

from ...strategies.core.private import of_lightning
from ...strategies.registry import stop_signal_of
from ..checkpoint.find import find_newest

ASKS_TO_STOP = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals handled here; Lightning or the strategy handles SIGTERM."""


class Interrupted(SystemExit):
    """Exit because of a signal, with the status that shells expect: 128 + its number."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


@contextmanager
def graceful_stop(trainer: pl.Trainer) -> Generator[None]:
    """Let Ctrl-C (SIGINT), a closed terminal (SIGHUP) and a scheduler's warning (SIGUSR1) stop training like SIGTERM.

    A second one exits at once. A signal that is ignored, as nohup does with SIGHUP, stays so.

    Raises:
        Interrupted: the run was stopped by a signal, to this process or to another rank.
    """
    received: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        if len(received) > 1 or frame is None or not _is_training(trainer):
            raise Interrupted(signum)
        of_lightning.sigterm_notifier_fn(of_lightning.signal_connector(trainer))(signum, frame)

    in_main_thread = threading.current_thread() is threading.main_thread()
    heard = [signum for signum in ASKS_TO_STOP if in_main_thread and signal.getsignal(signum) != signal.SIG_IGN]
    before = {signum: signal.signal(signum, stop) for signum in heard}
    try:
        yield
    except SIGTERMException as exc:
        raise Interrupted((received or [stop_signal_of(trainer.strategy) or signal.SIGTERM])[0]) from exc
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _is_training(trainer: pl.Trainer) -> bool:
    """Whether the loop that would save and stop has begun: before that, nothing is lost by ending at once."""
    by_step = trainer.fit_loop.epoch_loop.batch_progress.current.ready > 0  # Lightning's own trainer
    return trainer.state.fn == "fit" and getattr(trainer.fit_loop, "takes_steps", by_step)


def loss(run_dir: str) -> str:
    """Say what is lost of a run that was killed."""
    newest = find_newest(run_dir)
    if newest is None:
        return "nothing of this run was saved"
    return f"what was trained after its newest checkpoint, {newest}, is lost"
