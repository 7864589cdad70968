"""Show images of the examples in TensorBoard."""

import pytorch_lightning as pl
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor

PER_ROW = 8
NUM_SHOWN = PER_ROW**2


def draws_images(module: pl.LightningModule) -> bool:
    """Whether a logger takes images, and weights have been trained that they could be of."""
    return not module.trainer.sanity_checking and any(isinstance(log, TensorBoardLogger) for log in module.loggers)


def show_images(module: pl.LightningModule, tag: str, images: Tensor) -> None:
    """Add one picture of images side by side at the current step.

    Args:
        module: the module, whose loggers get the picture.
        tag: title in the IMAGES tab.
        images: shape (`NUM_SHOWN`, 1, height, width), in 0..1.
    """
    rows = images.detach().float().cpu().unflatten(0, (-1, PER_ROW))
    picture = rows.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
    for logger in module.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(tag, picture, module.global_step)
