"""Log a table of the module's layers before training."""

import logging
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelSummary
from typing_extensions import override

from ...strategies.core.text_table import draw_table

log = logging.getLogger(__name__)


class ModuleSummary(ModelSummary):
    """Lightning's `ModelSummary` as one table, in the log too; FLOPs only where they were counted.

    The numbers of parameters are in the block that `StartUp` logs. The arguments are Lightning's.
    """

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero or pl_module.example_input_array is not None:  # in its forward ranks may meet
            super().on_fit_start(trainer, pl_module)

    @staticmethod
    @override
    def summarize(summary_data: list[tuple[str, list[str]]], *args: Any, total_flops: int = 0, **kwargs: Any) -> None:
        columns = [(name, values) for name, values in summary_data if name != "FLOPs" or total_flops]
        rows = zip(*(values for _, values in columns), strict=True)
        log.info("\n%s", draw_table([tuple(name for name, _ in columns), *rows]))
