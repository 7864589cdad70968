"""Synchronize BatchNorm statistics over the global batch, on any device; torch's SyncBatchNorm refuses the CPU.

The moments of each rank's samples are exchanged once in forward, and their gradients once in backward.
"""

from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning.plugins.layer_sync import TorchSyncBatchNorm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from ..core.errors import ConfigError


class SyncedBatchNorm(_BatchNorm):
    """Class of BatchNorm layers during training; see `SyncBatchNorm`."""

    counts: bool
    """Whether this rank's samples count; False for a zero-weight batch."""
    plain_class: type[_BatchNorm]
    """The layer's own class."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return self.plain_class.forward(self, input)
        self._check_input_dim(input)
        values = input if input.dtype in (torch.float32, torch.float64) else input.float()
        mean, variance, num = _global_moments(values, self.counts)
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            for running, batch in ((self.running_mean, mean), (self.running_var, variance * num / (num - 1))):
                assert running is not None
                # without a momentum it is 1 / count, a tensor: the count is not read back to the host
                average = self.num_batches_tracked.to(running).reciprocal()
                momentum: Any = average if self.momentum is None else self.momentum
                running.lerp_(batch.detach().to(running.dtype), momentum)
        # torch's kernel takes moments for constants: how the output depends on them stands in its weight and bias
        at = mean.detach(), variance.detach()
        scale = torch.rsqrt(variance + self.eps) * (self.weight if self.affine else 1.0)
        shift = (at[0] - mean) * scale + (self.bias if self.affine else 0.0)
        weight = scale * torch.sqrt(at[1] + self.eps)
        return F.batch_norm(values, *at, weight, shift, eps=self.eps).to(input.dtype)

    @override
    def _check_input_dim(self, input: Tensor) -> None:
        self.plain_class._check_input_dim(self, input)


def _global_moments(values: Tensor, counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The mean and biased variance of the global batch, of shape (C,), and its number of values per channel.

    Source: Chan, Golub and LeVeque 1979.
    """
    dims, num_channels = [0, *range(2, values.dim())], values.shape[1]
    num = counts * values.numel() // num_channels
    both = torch.var_mean(values, dims, correction=0) if values.numel() else (values.sum(dims),) * 2
    own = torch.cat([both[1] * num, both[0] * num, values.new_full((1,), num)])
    others = torch.zeros_like(own)
    rows = [own if rank == dist.get_rank() else others for rank in range(dist.get_world_size())]
    table = _SumOverRanks.apply(torch.stack(rows))
    totals, squares, nums = table.split([num_channels, num_channels, 1], 1)
    whole = nums.sum()
    if num <= 1 and whole <= 1:  # the number is read back only where this rank has next to nothing
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {int(whole)} on all ranks together"
        )
    mean = totals.sum(0) / whole
    apart = (totals / nums.clamp_min(1) - mean).square() * nums
    return mean, (squares + apart).sum(0) / whole, whole


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor) -> Tensor:
        total = summand.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return _SumOverRanks.apply(grad_outputs[0])


def needs_two_samples(module: nn.Module) -> bool:
    """Whether a module has a BatchNorm layer that can't train on a rank's single sample."""
    return any(isinstance(layer, _BatchNorm) and not isinstance(layer, SyncedBatchNorm) for layer in module.modules())


def verify_whole_batch(module: nn.Module, synchronizes: bool, who: str, instead: str) -> None:
    """Refuse statistics that ranks would sum where a process normalises its batch in several parts, which never meet.

    Args:
        synchronizes: whether its BatchNorm layers will be made to synchronize; torch's own do so anyway.
        who: what cuts the batch of a process, to begin the message with.
        instead: what to set to have it in one piece.
    """
    kind = _BatchNorm if synchronizes else nn.SyncBatchNorm
    if layers := [name for name, layer in module.named_modules() if isinstance(layer, kind)]:
        raise ConfigError(
            f"{who} and sync_batchnorm=True: statistics are summed over ranks for one part of a process's batch at a "
            f"time, so that they are not the global batch's (layer {layers[0]!r}). Set {instead}, or "
            "sync_batchnorm=False."
        )


class SyncBatchNorm(TorchSyncBatchNorm):
    """Makes a module's BatchNorm layers synchronize, and reverts them. They stay the same objects."""

    @override
    def apply(self, model: nn.Module) -> nn.Module:
        for layer in model.modules():
            if isinstance(layer, _BatchNorm) and not isinstance(layer, (SyncedBatchNorm, nn.SyncBatchNorm)):
                vars(layer).update(plain_class=type(layer), counts=True)
                layer.__class__ = SyncedBatchNorm
        return model

    @override
    def revert(self, model: nn.Module) -> nn.Module:
        for layer in model.modules():
            if isinstance(layer, SyncedBatchNorm):
                layer.__class__ = vars(layer).pop("plain_class")
                del vars(layer)["counts"]
        return model
