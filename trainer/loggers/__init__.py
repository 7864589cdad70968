"""Provide the TensorBoard logger and the contents of its tabs.

Exports: TensorBoardLogger; hparams, custom_scalars.
May import: nothing else in the trainer.
"""

from .tensorboard import TensorBoardLogger

__all__ = ["TensorBoardLogger"]
