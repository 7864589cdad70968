"""`data.batch_size=auto`: the largest batch that fits into memory, found and confirmed by training steps."""

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from ...strategies.core import rng
from ...strategies.core.errors import ConfigError

logger = logging.getLogger(__name__)

CONFIRMING_STEPS = 3
"""Steps of the confirming run: the optimizer's own state is there from the second on."""


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """Find the largest batch size that fits, if all smaller ones do.

    Doubles until one does not fit, halves the interval, and confirms the result by asking again; memory that has
    come apart meanwhile makes it smaller.

    Args:
        fits: whether a number of samples fits.
        limit: the largest number worth asking for.

    Returns:
        The number of samples, at least 1.

    Raises:
        ConfigError: not even one sample fits.
    """
    good, bad = 0, limit + 1
    while good + 1 < bad:
        size = min(max(1, 2 * good), limit) if bad > limit else (good + bad) // 2
        if fits(size):
            good = size
        else:
            bad = size
    while good and not fits(good):
        good = good * 9 // 10
    if not good:
        raise ConfigError("batch_size=auto: not even one sample fits into memory. Make the model or its input smaller.")
    return good


def find_batch_size(
    make_module: Callable[[], pl.LightningModule],
    make_data: Callable[[int], pl.LightningDataModule],
    make_trainer: Callable[..., pl.Trainer],
) -> int:
    """Find the largest batch size for which training steps fit into memory.

    Modules, data and trainers of the search are its own, and the random state is put back: nothing of the run that
    follows has changed.

    Args:
        make_module: a new module; called once per attempt.
        make_data: new data with batches of so many samples.
        make_trainer: a new trainer of one process, given further keyword arguments.

    Returns:
        Samples per batch.

    Raises:
        ConfigError: not even one sample fits.
    """

    def fits(size: int) -> bool:
        try:
            _steps(make_module(), make_data(size), make_trainer)
        except torch.OutOfMemoryError:
            fit = False
        else:
            fit = True
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        logger.info("batch_size=auto: %d samples %s", size, "fit" if fit else "do not fit")
        return fit

    with rng.isolated():
        return largest(fits, _num_samples(make_data(1)))


def _steps(module: pl.LightningModule, data: pl.LightningDataModule, make_trainer: Callable[..., pl.Trainer]) -> None:
    trainer = make_trainer(
        max_epochs=-1,
        max_steps=CONFIRMING_STEPS,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        callbacks=[],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)


def _num_samples(data: pl.LightningDataModule) -> int:
    """Samples of the training set: no batch is larger."""
    data.prepare_data()
    data.setup("fit")
    loader: Any = data.train_dataloader()
    if not isinstance(loader, DataLoader):
        raise ConfigError("batch_size=auto needs train_dataloader() to return one DataLoader. Set data.batch_size.")
    try:
        return len(loader.dataset)  # pyright: ignore[reportArgumentType]  # TypeError where it has no length
    except TypeError as exc:
        raise ConfigError("batch_size=auto needs a dataset of known length. Set data.batch_size.") from exc
