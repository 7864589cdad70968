"""Have what decides by a number in a step decide by the same one on all ranks, that of the global batch.

Lightning's search for a learning rate and `SpikeDetection` judge a step by its loss; a `ReduceLROnPlateau` is stepped
by a module itself, in manual optimization or in its own `lr_scheduler_step`, by what it likes. With numbers of their
own ranks would decide otherwise, and train apart.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from pytorch_lightning.callbacks import Callback, SpikeDetection
from pytorch_lightning.tuner.lr_finder import _LRCallback
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..core.patching import Replacement, replaced


class Deciders:
    """Gives callbacks and schedulers what all ranks `agree` on, until `end`."""

    def __init__(self, agree: Callable[[Any], Any]) -> None:
        self._agree, self._replaced = agree, ExitStack()

    def begin(self, callbacks: Iterable[Callback], schedulers: Iterable[object]) -> None:
        """Share the numbers of those among them that decide by one, and of no others."""
        self.end()
        for callback in callbacks:
            if isinstance(callback, (_LRCallback, SpikeDetection)):
                self._replaced.callback(Replacement(callback, "on_train_batch_end", self._judge).remove)
        shared, own = {id(scheduler) for scheduler in schedulers}, ReduceLROnPlateau.step

        def step(scheduler: ReduceLROnPlateau, metrics: Any, *args: Any, **kwargs: Any) -> None:
            own(scheduler, self._agree(float(metrics)) if id(scheduler) in shared else metrics, *args, **kwargs)

        # of the class: what a scheduler has of its own goes into checkpoints
        self._replaced.enter_context(replaced(ReduceLROnPlateau, "step", step))

    def end(self) -> None:
        """Restore the hooks and the schedulers."""
        self._replaced.close()

    def _judge(self, own: Callable[..., None], trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        own(trainer, module, outputs if loss is None else self._agree(loss), *rest)
