"""Place the layers of the digits classifier on two devices by hand.

The strategy can make the same cut for an unmodified module: `python train.py strategy=model_parallel devices=2
strategy.partition=[head]`.
"""

import torch
from torch import Tensor, nn

from .digits import DigitsClassifier


class TwoDeviceDigitsClassifier(DigitsClassifier):
    """Convolutions on the first device of the process, linear layers on the last.

    With `strategy.partition=manual` only the two methods below move layers and tensors. With one device per process
    both halves are on that device, so `single_device` and `ddp` can train it too.
    """

    def configure_model(self) -> None:
        """Place the layers; called again if a checkpoint is tested on other devices."""
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
