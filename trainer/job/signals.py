"""Stop a run gracefully: SIGTERM, SIGINT, SIGHUP and SIGUSR1 end it between two steps, after writing a checkpoint."""

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

import pytorch_lightning as pl
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from ...strategies.distributed.process_exit import Answer, handled
from ...strategies.registry import stop_signal_of
from ..checkpoint.find import find_newest


class Interrupted(SystemExit):
    """Exit because of a signal, with the status that shells expect: 128 + its number.

    Args:
        begun: whether training had begun, so that there is something to save.

    Attributes:
        told: whether it was said that nothing was trained.
    """

    told = False

    def __init__(self, signum: int, begun: bool = True) -> None:
        super().__init__(128 + signum)
        self.signum = signum
        self.begun = begun


@contextmanager
def graceful_stop(trainer: pl.Trainer | None = None) -> Generator[None]:
    """Let Ctrl-C (SIGINT), a closed terminal (SIGHUP) and a scheduler's warning (SIGUSR1) stop training like SIGTERM.

    Whoever started several processes ends them at once where that is asked for; a single one does it here.

    Args:
        trainer: what trains; without one the process has nothing to save, and the first signal ends it at once.

    Raises:
        Interrupted: the run was stopped by a signal, to this process or to another rank.
    """

    def stop(answer: Answer, signum: int, frame: FrameType | None) -> None:
        if answer == "first":
            if frame is None or trainer is None or not saves(trainer):  # nothing is lost by ending at once
                raise Interrupted(signum, begun=trainer is not None and trainer.global_step > 0)
            trainer._signal_connector._sigterm_notifier_fn(signum, frame)
        elif answer == "at once" and trainer is not None and trainer.world_size == 1:
            raise Interrupted(signum)

    with handled(stop) as requests:
        try:
            yield
        except SIGTERMException as exc:
            told = None if trainer is None else stop_signal_of(trainer.strategy)
            raise Interrupted(requests.signum or told or signal.SIGTERM) from exc


def saves(trainer: pl.Trainer) -> bool:
    """Whether the loop that would save and stop has begun."""
    by_step = trainer.fit_loop.epoch_loop.batch_progress.current.ready > 0  # Lightning's own trainer
    return trainer.state.fn == "fit" and bool(getattr(trainer.fit_loop, "takes_steps", by_step))


def tell_stop(exc: BaseException) -> None:
    """Say of a run that a signal has ended before it had something to save that this is so."""
    if isinstance(exc, Interrupted) and not exc.begun:
        rank_zero_info(f"Stopped by {signal.Signals(exc.signum).name} before the first step.")
        exc.told = True


def loss(run_dir: str) -> str:
    """Say what is lost of a run that was killed."""
    newest = find_newest(run_dir)
    if newest is None:
        return "nothing of this run was saved"
    return f"what was trained after its newest checkpoint, {newest}, is lost"
