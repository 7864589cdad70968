"""Find the largest batch that fits into memory by running training steps (`data.batch_size=auto`)."""

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from ...strategies.core import rng
from ...strategies.core.devices import is_out_of_memory
from ...strategies.core.errors import ConfigError

logger = logging.getLogger(__name__)

CONFIRMING_STEPS = 3
"""Steps of each attempt: the optimizer's state exists from the second step on."""


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """Find the largest batch size that fits, assuming that all smaller ones fit too.

    Doubles until a size does not fit, then bisects, and confirms the result by a second attempt; if that fails
    because memory is fragmented, a smaller size is tried.

    Args:
        fits: whether a number of samples fits.
        limit: the largest number to try.

    Returns:
        The number of samples, at least 1.

    Raises:
        ConfigError: a batch of one sample does not fit.
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
        raise ConfigError(
            "batch_size=auto: a batch of one sample does not fit into memory. Use a smaller model or input."
        )
    return good


def find_batch_size(
    make_module: Callable[[], pl.LightningModule],
    make_data: Callable[[int], pl.LightningDataModule],
    make_trainer: Callable[..., pl.Trainer],
) -> int:
    """Find the largest batch size for which training steps fit into memory.

    The search has its own modules, data and trainers and restores the random state, so it does not affect the run
    that follows.

    Args:
        make_module: returns a new module; called once per attempt.
        make_data: returns new data with batches of the given size in samples.
        make_trainer: returns a new trainer of one process that writes nothing; takes further keyword arguments.

    Returns:
        Samples per batch.

    Raises:
        ConfigError: a batch of one sample does not fit.
    """

    def fits(size: int) -> bool:
        try:
            _steps(make_module(), make_data(size), make_trainer)
        except RuntimeError as exc:
            if not is_out_of_memory(exc):
                raise
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
    make_trainer(max_epochs=-1, max_steps=CONFIRMING_STEPS, callbacks=[]).fit(module, datamodule=data)


def _num_samples(data: pl.LightningDataModule) -> int:
    """Number of samples in the training set, the upper limit of the search."""
    data.prepare_data()
    data.setup("fit")
    loader: Any = data.train_dataloader()
    if not isinstance(loader, DataLoader):
        raise ConfigError("batch_size=auto needs train_dataloader() to return one DataLoader. Set data.batch_size.")
    try:
        return len(loader.dataset)  # pyright: ignore[reportArgumentType]  # TypeError if it has no length
    except TypeError as exc:
        raise ConfigError("batch_size=auto needs a dataset of known length. Set data.batch_size.") from exc
