"""Loggers and what they show.

Exports: TensorBoardLogger; hparams, custom_scalars.
May import: nothing else in the trainer.
"""

from .tensorboard import TensorBoardLogger

__all__ = ["TensorBoardLogger"]
