"""Have callbacks of Lightning that decide by a step's loss see the loss of the global batch.

Its search for a learning rate took rank 0's own losses, so that ranks trained with another rate than one device, and
`SpikeDetection` took each rank's, which are further from their mean than those of whole batches.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from pytorch_lightning.callbacks import Callback, SpikeDetection
from torch import Tensor

from ..core.patching import Replacement
from ..core.private.of_lightning import LRCallback


def share_losses(callbacks: Iterable[Callback], share: Callable[[Tensor], Tensor]) -> list[Replacement]:
    """Give the callbacks that judge a step by its loss that of the global batch.

    Args:
        callbacks: of any type.
        share: returns the loss of the global batch, of this rank's; all ranks call it.

    Returns:
        What stands for their hooks until it is removed.
    """
    judging = [callback for callback in callbacks if isinstance(callback, (LRCallback, SpikeDetection))]
    new = [callback for callback in judging if not isinstance(callback.on_train_batch_end, Replacement)]
    return [Replacement(callback, "on_train_batch_end", partial(_by_shared, share)) for callback in new]


def _by_shared(
    share: Callable[[Tensor], Tensor], own: Callable[..., None], trainer: Any, module: Any, outputs: Any, *rest: Any
) -> None:
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    own(trainer, module, share(loss) if isinstance(loss, Tensor) else outputs, *rest)
