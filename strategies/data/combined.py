"""Refuse loaders that are read side by side and that ranks would cut in unequal parts."""

from collections.abc import Sequence
from math import inf
from typing import Any

from pytorch_lightning.utilities.combined_loader import CombinedLoader

from ..batch.run_structures import steps_side_by_side
from ..core.errors import ConfigError
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
    read: Sequence[Any] = combined.flattened if isinstance(combined, CombinedLoader) else ()
    batches: list[RankBatches | None] = [getattr(loader, "rank_batches", None) for loader in read]
    parts = [("", sizes) for one in batches if one is not None and (sizes := one.part_sizes()) is not None]
    for step, now in steps_side_by_side(combined, parts, most):
        first = now[0][1]
        for _, sizes in now:
            if any(mine * sum(first) != other * sum(sizes) for mine, other in zip(sizes, first, strict=True)):
                raise ConfigError(
                    f"{strategy}: the loaders combined by {combined._mode!r} give the ranks unequal parts "
                    f"in step {step}: {' + '.join(map(str, first))} samples of one loader and "
                    f"{' + '.join(map(str, sizes))} of another, {why}"
                )
