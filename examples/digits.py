"""Classify handwritten digits: scikit-learn's 1797 images of 8×8 pixels and a small conv net."""

from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

from ..strategies.core.errors import ConfigError
from .pictures import NUM_SHOWN, draws_images, show_images

try:  # here, so that ranks forked from the command find it imported
    from sklearn import datasets as sklearn
except ImportError:
    sklearn = None

NUM_CLASSES = 10
IMAGE_SIDE = 8
"""Pixels."""

Digits = tuple[Tensor, Tensor]
"""Images of shape (N, 1, 8, 8), in 0..1, and their classes of shape (N,), in 0..9."""


class DigitsDataModule(pl.LightningDataModule):
    """The digits, split into training, validation and test images.

    Args:
        batch_size: samples per batch of one loader.
        num_val: number of validation samples.
        num_test: number of test samples, also used for prediction; the remaining samples are for training.
        split_seed: seed of the splits, independent of the run's seed.
        num_workers: worker processes per loader; 0 loads in the training process (the images are in memory).

    Raises:
        ConfigError: no training sample is left, or scikit-learn is not installed.
    """

    def __init__(
        self,
        batch_size: int = 64,
        num_val: int = 297,
        num_test: int = 300,
        split_seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_val = num_val
        self.num_test = num_test
        self.split_seed = split_seed
        self.num_workers = num_workers
        self.train_set: Subset[Digits] | None = None
        self.val_set: Subset[Digits] | None = None
        self.test_set: Subset[Digits] | None = None

    def setup(self, stage: str | None = None) -> None:
        """Read the images and split them into three sets, equal in every process."""
        if self.train_set is not None:
            return
        samples = TensorDataset(*load_digits())
        num_train = len(samples) - self.num_val - self.num_test
        if num_train < 1 or min(self.num_val, self.num_test) < 1:
            raise ConfigError(
                f"DigitsDataModule: num_val={self.num_val} and num_test={self.num_test} leave {num_train} of "
                f"{len(samples)} samples to train on. Give both at least 1, and less than {len(samples)} together."
            )
        generator = torch.Generator().manual_seed(self.split_seed)
        self.train_set, self.val_set, self.test_set = random_split(
            samples, [num_train, self.num_val, self.num_test], generator
        )

    def train_dataloader(self) -> DataLoader[Digits]:
        """Return the training images, shuffled each epoch."""
        return self._loader(self.train_set, shuffle=True)

    def val_dataloader(self) -> DataLoader[Digits]:
        """Return the validation images, in order."""
        return self._loader(self.val_set)

    def test_dataloader(self) -> DataLoader[Digits]:
        """Return the test images, in order."""
        return self._loader(self.test_set)

    def predict_dataloader(self) -> DataLoader[Digits]:
        """Return the test images, in order."""
        return self._loader(self.test_set)

    def _loader(self, samples: Subset[Digits] | None, shuffle: bool = False) -> DataLoader[Digits]:
        assert samples is not None, "setup() must be called first"
        return DataLoader(
            samples,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            # Starting processes costs more than an epoch of this data.
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),  # copies to a GPU do not wait then
        )


def load_digits() -> Digits:
    """Read the digits that are part of scikit-learn; nothing is downloaded.

    Returns:
        Images of shape (1797, 1, 8, 8), float32 in 0..1, and classes of shape (1797,), int64.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    if sklearn is None:
        raise ConfigError("The digits need scikit-learn, which is not installed. Run: pip install 'evener[examples]'.")
    data: Any = sklearn.load_digits()
    # The pixels are counts of 0..16 ink dots.
    images = torch.from_numpy(data.images).float().div(16).unsqueeze(1)
    return images, torch.from_numpy(data.target).long()


def labelled(batch: Any) -> Digits:
    """Check that a batch consists of images and their classes.

    Raises:
        ConfigError: the batch has other data, such as text.
    """
    if isinstance(batch, (list, tuple)) and len(batch) == 2:
        return batch[0], batch[1]
    raise ConfigError(
        f"This module expects batches of (images, classes), got {type(batch).__name__}. "
        "Choose data=digits, or the module that matches your data (module=char_lm for data=char_lm)."
    )


class DigitsClassifier(pl.LightningModule):
    """Two convolutions and two linear layers.

    Args:
        lr: learning rate of AdamW.
        weight_decay: weight decay of AdamW, multiplied by `lr`.
        channels: channels of the first convolution; the second has twice as many.
        hidden: units of the hidden linear layer.
    """

    def __init__(self, lr: float = 5e-3, weight_decay: float = 0.01, channels: int = 16, hidden: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.weight_decay = weight_decay
        # No BatchNorm: its statistics differ between strategies.
        self.features = nn.Sequential(
            nn.Conv2d(1, channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Sequential(
            nn.Linear(2 * channels * (IMAGE_SIDE // 2) ** 2, hidden),
            nn.ReLU(),
            nn.Linear(hidden, NUM_CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Score each class.

        Args:
            images: shape (N, 1, 8, 8), in 0..1.

        Returns:
            Logits of shape (N, 10).
        """
        return self.head(self.features(images))

    def training_step(self, batch: Digits, batch_idx: int) -> Tensor:
        """Return the mean cross entropy of the batch, in nats."""
        images, classes = labelled(batch)
        loss = F.cross_entropy(self(images), classes)
        self.log("train/loss", loss, batch_size=len(classes), prog_bar=True)
        return loss

    def validation_step(self, batch: Digits, batch_idx: int) -> None:
        """Log `val/loss` and `val/acc`."""
        self._evaluate(batch, "val")

    def on_validation_epoch_end(self) -> None:
        """Show the first validation images in TensorBoard; those that are classified wrongly are dimmed."""
        data = self.trainer.datamodule if draws_images(self) else None
        if isinstance(data, DigitsDataModule) and data.val_set is not None:
            images, classes = data.val_set[:NUM_SHOWN]
            images = images.to(self.device, next(self.parameters()).dtype)
            right = self(images).argmax(dim=1).cpu() == classes
            show_images(self, "classified", images.cpu() * (0.3 + 0.7 * right).view(-1, 1, 1, 1))

    def test_step(self, batch: Digits, batch_idx: int) -> None:
        """Log `test/loss` and `test/acc`."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Digits, batch_idx: int) -> Tensor:
        """Return the classes with the highest scores, shape (N,)."""
        images, _ = labelled(batch)
        return self(images).argmax(dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    def _evaluate(self, batch: Digits, split: str) -> None:
        images, classes = labelled(batch)
        logits = self(images)
        metrics = {
            f"{split}/loss": F.cross_entropy(logits, classes),
            f"{split}/acc": (logits.argmax(dim=1) == classes).float().mean(),
        }
        # A mean weighted by batch_size over batches and ranks is the mean over samples, ragged batches included.
        self.log_dict(metrics, batch_size=len(classes), prog_bar=True, sync_dist=True)
