"""Provide the loggers that write a run's files, and the contents of TensorBoard's tabs.

Exports: CSVLogger, TensorBoardLogger, WandbLogger, MLFlowLogger, CometLogger; journal, csv, hparams, custom_scalars.
May import: nothing else in the trainer.
"""

from .csv import CSVLogger
from .tensorboard import TensorBoardLogger
from .trackers import CometLogger, MLFlowLogger, WandbLogger

__all__ = ["CSVLogger", "CometLogger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"]
