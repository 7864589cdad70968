"""Provide the loggers that write a run's files, and the contents of TensorBoard's tabs.

Exports: CSVLogger, TensorBoardLogger; csv, hparams, custom_scalars.
May import: nothing else in the trainer.
"""

from .csv import CSVLogger
from .tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "TensorBoardLogger"]
