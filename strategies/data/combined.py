"""Refuse loaders that are read side by side and that ranks would cut in unequal parts."""

from math import inf
from typing import Any

from pytorch_lightning.utilities.combined_loader import CombinedLoader

from ..core.errors import ConfigError
from ..core.private import of_lightning
from .sampling import RankBatches

EVALUATED = (
    "so their batches can't be evaluated side by side. Give them one batch size and drop_last=True, or pass them as a "
    "list, which is read one after the other."
)
TRAINED = (
    "so no weight of a rank's loss makes the step one device's. Give them batch sizes that divide alike and "
    'drop_last=True, or return {"loss": loss, "loss_weight": n} with a loss that is a mean over n.'
)


def verify_side_by_side(combined: Any, strategy: str, why: str = EVALUATED, most: float = inf) -> None:
    """Refuse loaders of which a rank has unequal parts in one step.

    In evaluation a rank skips a batch of which it has no samples. If it skips that of one loader only, its batches no
    longer belong together, and those at the end are lost. In training a rank's loss has one weight only.

    Args:
        combined: the loop's loader, made for this rank.
        strategy: name that begins the message.
        why: end of the message: `EVALUATED` or `TRAINED`.
        most: number of steps after which the loop ends.

    Raises:
        ConfigError: the parts differ in some step.
    """
    mode = of_lightning.mode(combined) if isinstance(combined, CombinedLoader) else "sequential"
    if mode == "sequential" or len(combined.flattened) < 2:
        return
    read: list[RankBatches | None] = [getattr(loader, "rank_batches", None) for loader in combined.flattened]
    steps = [sizes for one in read if one is not None and (sizes := one.part_sizes()) is not None]
    for step in range(int(min(max(map(len, steps), default=0), most))):
        if mode == "min_size" and step >= min(map(len, steps)):
            return
        cycles = mode == "max_size_cycle"
        now = [sizes[step % len(sizes)] for sizes in steps if sizes and (step < len(sizes) or cycles)]
        for sizes in now:
            if any(mine * sum(now[0]) != first * sum(sizes) for mine, first in zip(sizes, now[0], strict=True)):
                raise ConfigError(
                    f"{strategy}: the loaders combined by {mode!r} give the ranks unequal parts in step "
                    f"{step + 1}: {_listed(now[0])} samples of one loader and {_listed(sizes)} of another, {why}"
                )


def _listed(sizes: list[int]) -> str:
    return " + ".join(map(str, sizes))
