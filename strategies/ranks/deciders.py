"""Have what decides by a number in a step decide by the same one on all ranks, that of the global batch.

Lightning's search for a learning rate and `SpikeDetection` judge a step by its loss; a `ReduceLROnPlateau` is stepped
by a module itself, in manual optimization or in its own `lr_scheduler_step`, by what it likes. With numbers of their
own ranks would decide otherwise, and train apart.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any

from pytorch_lightning.callbacks import Callback, SpikeDetection
from pytorch_lightning.tuner.lr_finder import _LRCallback
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..core.patching import Replacement, replaced


@contextmanager
def deciding_alike(
    callbacks: Iterable[Callback],
    schedulers: Iterable[object],
    agree: Callable[[Any], Any],
    whole_loss: Callable[[Any], Any],
) -> Generator[None]:
    """Give those among callbacks and schedulers that decide by a number what ranks `agree` on, or a loss's whole."""
    shared, own = {id(scheduler) for scheduler in schedulers}, ReduceLROnPlateau.step

    def step(scheduler: ReduceLROnPlateau, metrics: Any, *args: Any, **kwargs: Any) -> None:
        own(scheduler, agree(float(metrics)) if id(scheduler) in shared else metrics, *args, **kwargs)

    def judge(own: Callable[..., None], trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        own(trainer, module, outputs if loss is None else whole_loss(loss), *rest)

    # of the class: what a scheduler has of its own goes into checkpoints
    with ExitStack() as stack, replaced(ReduceLROnPlateau, "step", step):
        for callback in callbacks:
            if isinstance(callback, (_LRCallback, SpikeDetection)):
                stack.callback(Replacement(callback, "on_train_batch_end", judge).remove)
        yield
