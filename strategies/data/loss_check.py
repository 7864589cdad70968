"""Check that a loss is the mean over samples by which ranks weigh it.

Two samples show it: the loss of both together is the mean of the losses of each. If it is not, the loss is normalised
by something else (atoms, tokens), or depends on which samples are together (a contrastive loss).
"""

import math
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from ..batch.evidence import fetch_pair
from ..core.errors import ConfigError
from ..core.private import of_torch
from ..core.types import Batch

_SEEDS = (1, 2)
_CLOSE, _CLEAR = 1e-3, 0.05
"""Differences of losses, as fractions of the largest: what rounding may make, and what can't be by chance."""


def verify_mean(loss_of: Callable[[Batch, int], float], loader: Any, strategy: str) -> bool:
    """Refuse a loss that is not the mean over samples.

    Args:
        loss_of: computes the loss of a batch with a seed, and leaves no trace.
        loader: its samples are used.
        strategy: name that begins messages.

    Returns:
        Whether it is known to be one. It is not where samples can't be chosen, where the loss draws random numbers, or
        where both samples have nearly the same loss.

    Raises:
        ConfigError: it is not the mean over samples.
    """
    try:  # arbitrary code, in evaluation mode: what fails here shows nothing, as a collective does
        one, other, both = first = _losses(loss_of, loader, _SEEDS[0])
        largest, gap = max(map(abs, first)), abs(one - other)
        if not math.isfinite(both) or abs(both - (one + other) / 2) <= _CLOSE * (largest + gap):
            return gap > _CLEAR * largest
        again = _losses(loss_of, loader, _SEEDS[1])
    except Exception:  # noqa: BLE001  # see above
        return False
    if all(a == b or not abs(a - b) > _CLOSE * largest for a, b in zip(first, again, strict=True)):
        raise ConfigError(
            f"{strategy}: the loss is not the mean over samples, by which ranks are weighted: it is {one:.4g} and "
            f"{other:.4g} for two samples, and {both:.4g} for both together. If it is a mean over something else "
            '(atoms, tokens), return {"loss": loss, "loss_weight": n} from training_step; use strategy=single_device; '
            "or set strategy.verify_loss=false to weight it by samples nevertheless, which trains otherwise than one "
            "device."
        )
    return False


def _losses(loss_of: Callable[[Batch, int], float], loader: Any, seed: int) -> list[float]:
    with _OneRank():
        return [loss_of(batch, seed) for batch in fetch_pair(loader, seed)]


class _OneRank(of_torch.TorchDispatchMode):
    """Refuses collectives: the other ranks, whose batches may show nothing, need not try the loss, too."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError("a rank that tries its loss alone can't communicate")
        return func(*args, **(kwargs or {}))
