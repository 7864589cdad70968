"""Provide the loggers that write a run's files, and the contents of TensorBoard's tabs.

Exports: CSVLogger, TensorBoardLogger, WandbLogger, MLFlowLogger, CometLogger; journal.
May import: nothing else in the trainer.
"""

from .journal import CSVLogger, TensorBoardLogger
from .trackers import CometLogger, MLFlowLogger, WandbLogger

__all__ = ["CSVLogger", "CometLogger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"]
