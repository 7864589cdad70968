"""Have what decides by a number in a step decide by the same one on all ranks, that of the global batch.

Lightning's search for a learning rate and `SpikeDetection` judge a step by its loss; a `ReduceLROnPlateau` is stepped
by a module itself, in manual optimization or in its own `lr_scheduler_step`, by what it likes. With numbers of their
own ranks would decide otherwise, and train apart.
"""

from collections.abc import Callable, Iterable
from typing import Any

from pytorch_lightning.callbacks import Callback, SpikeDetection
from pytorch_lightning.tuner.lr_finder import _LRCallback
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..core.patching import Replacement


class Deciders:
    """Gives callbacks and schedulers what all ranks have agreed on, until `end`.

    Args:
        agree: returns the global batch's number, or tensor, of this rank's; all ranks call it.
    """

    def __init__(self, agree: Callable[[Any], Any]) -> None:
        self._agree = agree
        self._hooks: list[Replacement] = []
        self._schedulers: set[int] = set()
        self._own_step: Any = None

    def begin(self, callbacks: Iterable[Callback], schedulers: Iterable[object]) -> None:
        """Share the numbers of those among them that decide by one; those that are shared stay so."""
        for callback in callbacks:
            if isinstance(callback, (_LRCallback, SpikeDetection)) and "on_train_batch_end" not in vars(callback):
                self._hooks.append(Replacement(callback, "on_train_batch_end", self._judge))
        self._schedulers = {id(scheduler) for scheduler in schedulers}
        if self._own_step is None:  # of the class: what a scheduler has of its own goes into checkpoints
            self._own_step = own = ReduceLROnPlateau.step

            def step(scheduler: ReduceLROnPlateau, metrics: Any, *args: Any, **kwargs: Any) -> None:
                is_shared = id(scheduler) in self._schedulers
                own(scheduler, self._agree(float(metrics)) if is_shared else metrics, *args, **kwargs)

            setattr(ReduceLROnPlateau, "step", step)  # noqa: B010

    def end(self) -> None:
        """Restore the hooks and the schedulers."""
        while self._hooks:
            self._hooks.pop().remove()
        if self._own_step is not None:
            setattr(ReduceLROnPlateau, "step", self._own_step)  # noqa: B010
            self._own_step = None

    def _judge(self, own: Callable[..., None], trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        own(trainer, module, outputs if loss is None else self._agree(loss), *rest)
