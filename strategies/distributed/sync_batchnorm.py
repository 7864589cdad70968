"""Synchronize BatchNorm statistics over the global batch, on any device.

torch's SyncBatchNorm refuses the CPU. This one takes torch's kernels for whatever has the size of the batch, and
exchanges the moments of each rank's samples: once in forward, and the sums of the gradients once in backward.
"""

from typing import Any

import torch
from pytorch_lightning.plugins.layer_sync import TorchSyncBatchNorm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from ..core.errors import ConfigError
from .objects import gather_rows
from .reduction import all_reduce


class SyncedBatchNorm(_BatchNorm):
    """Class of BatchNorm layers during training; see `SyncBatchNorm`.

    Attributes:
        counts: whether this rank's samples count; False for a zero-weight batch.
        plain_class: original class of the layer.
    """

    counts: bool
    plain_class: type[_BatchNorm]

    @override
    def forward(self, input: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return self.plain_class.forward(self, input)
        self._check_input_dim(input)
        mean, variance, num = _global_moments(input.detach(), self.counts)
        if self.training and self.track_running_stats:
            self._track(mean, variance * num / (num - 1))
        return _Normalized.apply(input, self.weight, self.bias, mean, variance, num, self.eps, self.counts)

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


def _global_moments(input: Tensor, counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the moments of the global batch from those of each rank (Chan, Golub and LeVeque 1979).

    Args:
        input: this rank's samples, shape (N, C, ...).
        counts: whether they count.

    Returns:
        Mean and biased variance, each of shape (C,), and the number of values per channel, shape (1,); in float32 or
        float64.

    Raises:
        ValueError: there is one value per channel, which has no variance; plain BatchNorm refuses it, too.
    """
    values = _in_full(input)
    num = counts * values.numel() // values.shape[1]
    own = values.new_zeros(2 * values.shape[1] + 1)
    if num:
        mean, variance = torch.batch_norm_update_stats(values, None, None, 0.0)
        torch.cat([mean, variance, values.new_full((1,), num)], out=own)  # new_tensor would wait for the device
    means, variances, nums = gather_rows(own).split([values.shape[1], values.shape[1], 1], 1)
    total = nums.sum(0)
    if num <= 1 and total <= 1:  # the total is read back only where this rank has next to nothing
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {int(total)} on all ranks together"
        )
    mean = (means * nums).sum(0) / total
    return mean, ((variances + (means - mean).square()) * nums).sum(0) / total, total


class _Normalized(torch.autograd.Function):
    """Normalizes this rank's samples by the moments of the global batch; its backward sums over ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        num: Tensor,
        eps: float,
        counts: bool,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, bias, mean, variance, num)
        ctx.eps, ctx.counts = eps, counts
        return F.batch_norm(input, mean, variance, weight, bias, eps=eps)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        if torch.is_grad_enabled():  # a gradient of gradients needs the moments as functions of the input
            return (*_composed_backward(ctx, grad), *_NOT_NEEDED)
        input, weight, _, mean, variance, num = ctx.saved_tensors
        scale = torch.ones_like(mean) if weight is None else weight
        grad_input, grad_weight, grad_bias = _own_gradients(grad, input, scale, mean, variance, ctx.eps)
        sums = torch.stack([grad_bias, grad_weight]).to(mean.dtype)
        all_reduce(sums)
        if ctx.counts:
            deviation = (variance + ctx.eps).rsqrt()
            constant, slope = sums * (scale * deviation / num)
            shape = _per_channel(input)
            common = (
                (input - mean.reshape(shape)).mul_((slope * deviation).reshape(shape)).add_(constant.reshape(shape))
            )
            grad_input = (grad_input - common).to(input.dtype)
        own = (None, None) if weight is None else (grad_weight, grad_bias)
        return (grad_input, *own, *_NOT_NEEDED)


_NOT_NEEDED = (None,) * 5


def _own_gradients(
    grad: Tensor, input: Tensor, scale: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input, weight and bias, as if the moments were constants."""
    if not input.numel():  # torch's kernel on the CPU divides by the size
        return torch.zeros_like(input), torch.zeros_like(scale), torch.zeros_like(scale)
    return torch.ops.aten.native_batch_norm_backward(
        grad, input, scale, mean, variance, None, None, False, eps, [True, True, True]
    )


def _composed_backward(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """The gradients of input, weight and bias as functions of all three, composed of differentiable sums over ranks."""
    saved: list[Any] = list(ctx.saved_tensors)
    input, weight, bias, *_, num = saved
    values, shape = _in_full(input), _per_channel(input)
    dims = [0, *range(2, values.dim())]
    mean = _SumOverRanks.apply(values.sum(dims) * float(ctx.counts)) / num
    centered = values - mean.reshape(shape)
    variance = _SumOverRanks.apply(centered.square().sum(dims) * float(ctx.counts)) / num
    output = centered * (variance + ctx.eps).rsqrt().reshape(shape)
    if weight is not None:
        output = output * weight.reshape(shape) + bias.reshape(shape)
    needs: list[bool] = list(ctx.needs_input_grad[:3])
    inputs: Any = [tensor for tensor, needed in zip((input, weight, bias), needs, strict=True) if needed]
    gradients = torch.autograd.grad(output.to(input.dtype), inputs, grad, create_graph=True)
    found = iter(gradients)
    return [next(found) if needed else None for needed in needs]


def _in_full(input: Tensor) -> Tensor:
    return input if input.dtype in (torch.float32, torch.float64) else input.float()


def _per_channel(input: Tensor) -> list[int]:
    return [1, -1, *[1] * (input.dim() - 2)]


class _SumOverRanks(torch.autograd.Function):
    """Sum of a tensor over all ranks; its backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor) -> Tensor:
        total = summand.clone()
        all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return _SumOverRanks.apply(grad_outputs[0])


def needs_two_samples(module: nn.Module) -> bool:
    """Whether a module has a BatchNorm layer that can't train on a rank's single sample."""
    return any(isinstance(layer, _BatchNorm) and not isinstance(layer, SyncedBatchNorm) for layer in module.modules())


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
        if isinstance(layer, _BatchNorm if synchronizes else nn.SyncBatchNorm)
    ]
    if layers:
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
