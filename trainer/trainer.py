"""The trainer: Lightning's, with strategies of this project chosen by object or by one word."""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.strategies import Strategy

from ..strategies import STRATEGIES


class Trainer(pl.Trainer):
    """`pytorch_lightning.Trainer` that also takes this project's strategies.

    Args:
        strategy: a strategy object, or a name: those of `evener.strategies.STRATEGIES`, or any of Lightning's.
        **kwargs: every argument of `pytorch_lightning.Trainer`, with the same meaning and the same default.
    """

    def __init__(self, *, strategy: str | Strategy = "auto", **kwargs: Any) -> None:
        if isinstance(strategy, str) and strategy in STRATEGIES:
            strategy = STRATEGIES[strategy]()
        super().__init__(strategy=strategy, **kwargs)
