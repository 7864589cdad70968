"""Synchronize BatchNorm statistics over the global batch, on any device.

torch's SyncBatchNorm refuses the CPU. This one is composed of differentiable sums over ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning.plugins.layer_sync import LayerSync
from torch import Tensor, nn
from typing_extensions import override

from ..core.errors import ConfigError
from ..core.private.of_torch import BatchNorm


class SyncedBatchNorm(BatchNorm):
    """Class of BatchNorm layers during training; see `SyncBatchNorm`.

    Attributes:
        counts: whether this rank's samples count; False for a zero-weight batch.
        plain_class: original class of the layer.
    """

    counts: bool
    plain_class: type[BatchNorm]

    @override
    def forward(self, input: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return self.plain_class.forward(self, input)
        self._check_input_dim(input)
        values = input if input.dtype in (torch.float32, torch.float64) else input.float()
        dims = [0, *range(2, values.dim())]
        shape = [1, -1, *[1] * (values.dim() - 2)]
        counts = float(self.counts)
        count = values.new_full((1,), counts * values.numel() / values.shape[1])  # new_tensor would wait for the device
        total = _SumOverRanks.apply(torch.cat([values.sum(dims) * counts, count]))
        num = total[-1].detach()
        mean = total[:-1] / num
        centered = values - mean.reshape(shape)
        variance = _SumOverRanks.apply(centered.square().sum(dims) * counts) / num
        if self.training and self.track_running_stats:
            self._track(mean.detach(), variance.detach() * num / (num - 1))
        output = centered * (variance + self.eps).rsqrt().reshape(shape)
        if self.affine:
            output = output * self.weight.reshape(shape) + self.bias.reshape(shape)
        return output.to(input.dtype)

    @override
    def _check_input_dim(self, input: Tensor) -> None:
        self.plain_class._check_input_dim(self, input)

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        for running, batch in ((self.running_mean, mean), (self.running_var, variance)):
            # without a momentum it is 1 / count, a tensor: the count is not read back to the host
            average = self.num_batches_tracked.to(running).reciprocal()
            momentum: Any = average if self.momentum is None else self.momentum
            running.lerp_(batch.to(running.dtype), momentum)


class _SumOverRanks(torch.autograd.Function):
    """Sum of a tensor over all ranks; its backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor) -> Tensor:
        total = summand.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        total = grad_outputs[0].clone()
        dist.all_reduce(total)
        return total


def verify_whole_batch(module: nn.Module, synchronizes: bool, who: str, instead: str) -> None:
    """Refuse synchronized statistics where a process normalises its batch in several parts.

    Ranks would sum the statistics of one part each, and the parts of a process never meet.

    Args:
        synchronizes: whether its BatchNorm layers will be made to synchronize; torch's own do so anyway.
        who: what cuts the batch of a process, to begin the message with.
        instead: what to set to have it in one piece.

    Raises:
        ConfigError: a layer synchronizes.
    """
    layers = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, BatchNorm if synchronizes else nn.SyncBatchNorm)
    ]
    if layers:
        raise ConfigError(
            f"{who} and sync_batchnorm=True: statistics are summed over ranks for one part of a process's batch at a "
            f"time, so that they are not the global batch's (layer {layers[0]!r}). Set {instead}, or "
            "sync_batchnorm=False."
        )


class SyncBatchNorm(LayerSync):
    """Makes a module's BatchNorm layers synchronize, and reverts them. They stay the same objects."""

    @override
    def apply(self, model: nn.Module) -> nn.Module:
        for layer in model.modules():
            if isinstance(layer, BatchNorm) and not isinstance(layer, (SyncedBatchNorm, nn.SyncBatchNorm)):
                plain: Any = type(layer)
                layer.__class__ = SyncedBatchNorm
                vars(layer).update(plain_class=plain, counts=True)
        return model

    @override
    def revert(self, model: nn.Module) -> nn.Module:
        for layer in model.modules():
            if isinstance(layer, SyncedBatchNorm):
                plain: Any = layer.plain_class
                layer.__class__ = plain
                del vars(layer)["plain_class"], vars(layer)["counts"]
        return model
