"""The digits classifier on two devices, each layer placed by hand: model parallelism without any help.

The same cut by the strategy itself needs no module of its own: `python train.py strategy=model_parallel devices=2
strategy.partition=[head]`.
"""

import torch
from torch import Tensor, nn

from .digits import DigitsClassifier


class TwoDeviceDigitsClassifier(DigitsClassifier):
    """Convolutions on the first device of the process, linear layers on its last.

    With `strategy.partition=manual` nothing moves a layer or a tensor but the two methods below. With one device per
    process both halves are on it, so that every strategy of one device or of DDP trains it too.
    """

    def configure_model(self) -> None:
        """Place the layers; called again, with other devices, when a checkpoint is tested elsewhere."""
        devices = getattr(self.trainer.strategy, "process_devices", None) or [self.trainer.strategy.root_device]
        self.features.to(devices[0])
        self.head.to(devices[-1])

    def forward(self, images: Tensor) -> Tensor:
        """Score each class.

        Args:
            images: shape (N, 1, 8, 8), in 0..1, on any device.

        Returns:
            Logits of shape (N, 10), on the device of the labels: `self.device`.
        """
        features = self.features(images.to(device_of(self.features)))
        return self.head(features.to(device_of(self.head))).to(self.device)


def device_of(module: nn.Module) -> torch.device:
    """The device of a module that is on one device."""
    return next(module.parameters()).device
