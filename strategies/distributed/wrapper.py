"""Around torch's DistributedDataParallel: its options, readable errors, and BatchNorm over the global batch.

torch's SyncBatchNorm refuses the CPU. Here the moments of each rank's samples are exchanged once in forward, and their
gradients once in backward.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, TypeAlias

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.plugins.layer_sync import TorchSyncBatchNorm
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from ..core.errors import ConfigError
from ..core.options import Positive, verify_value
from .objects import gather_unequal

Compression: TypeAlias = Literal["fp16", "bf16", "powersgd"]
"""Compression of gradients between ranks."""

_OURS = ("module", "device_ids", "output_device", "process_group", "init_sync", "self")


@cache
def reducer_options() -> dict[str, Any]:
    """Names and annotations of the options of torch's DistributedDataParallel; None takes torch's own default."""
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    hints: dict[str, Any] = {
        name: bool | None if isinstance(parameter.default, bool) else Any for name, parameter in parameters.items()
    }
    return {name: hint for name, hint in (hints | {"bucket_cap_mb": Positive | None}).items() if name not in _OURS}


def verified_options(strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    """Refuse unknown options, invalid values and options that exclude each other; return the others that are set."""
    allowed = reducer_options()
    if unknown := [name for name in options if name not in allowed]:
        raise ConfigError(f"{strategy}: {', '.join(unknown)} is unknown; choose from {', '.join(allowed)}.")
    for name, value in options.items():
        verify_value(name, value, allowed[name], f"{strategy}: ")
    if options.get("static_graph") and options.get("find_unused_parameters"):
        raise ConfigError(
            f"{strategy}: static_graph=true and find_unused_parameters=true were both given. A static graph finds "
            "unused parameters in the first step. Remove find_unused_parameters."
        )
    return {name: value for name, value in options.items() if value is not None}


def verify_static(module: pl.LightningModule, cut_by: str, strategy: str) -> None:
    """Refuse `static_graph` where a step has not one backward pass: a batch is cut, by an option, or the module's."""
    if cut_by or not module.automatic_optimization:
        why = f"with {cut_by} each part of a batch has one" if cut_by else "in manual optimization the module runs any"
        raise ConfigError(
            f"{strategy}: static_graph=true needs one backward pass per step, but {why}. Set static_graph=false."
        )


UNUSED = ": parameters took no part in the loss: "
"""How torch's error goes on after the strategy's name once it is rewritten: a sentence, of a class of torch's."""


def name_unused_parameters(exc: BaseException, parameters: Sequence[tuple[str, Tensor]], strategy: str) -> None:
    """Rewrite torch's error about parameters without gradients, of those it reduces: name them, and what to set."""
    text = str(exc)
    if "Expected to have finished reduction in the prior iteration" in text:
        indices = re.search(r"did not receive grad for rank \d+: ([\d ,]+)", text)
        unused = [parameters[int(i)][0] for i in re.findall(r"\d+", indices[1])] if indices else ["unknown"]
        exc.args = (
            f"{strategy}{UNUSED}{', '.join(unused)}. Set strategy.find_unused_parameters=true (or "
            "strategy.static_graph=true if they are the same in every step), or freeze them with "
            "requires_grad_(False).",
        )


def compression_hook(compression: Compression | None) -> Callable[[], tuple[Any, Any]] | None:
    """Choose what returns the state and the communication hook of a compression; None without."""
    if compression is None:
        return None
    if compression == "powersgd":
        return lambda: (powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    return lambda: (None, default_hooks.fp16_compress_hook if compression == "fp16" else reduce_in_bf16)


def reduce_in_bf16(group: Any, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket of gradients in bf16: torch's hook, which the wrapper refuses by name without CUDA."""
    return default_hooks.bf16_compress_hook(group, bucket)


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
    table = gather_unequal(own.unsqueeze(0), [1] * dist.get_world_size())
    totals, squares, nums = table.split([num_channels, num_channels, 1], 1)
    whole = nums.sum()
    if num <= 1 and whole <= 1:  # the number is read back only where this rank has next to nothing
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {int(whole)} on all ranks together"
        )
    mean = totals.sum(0) / whole
    apart = (totals / nums.clamp_min(1) - mean).square() * nums
    return mean, (squares + apart).sum(0) / whole, whole


def needs_two_samples(module: nn.Module) -> bool:
    """Whether a module has a BatchNorm layer that can't train on a rank's single sample."""
    return any(isinstance(layer, _BatchNorm) and not isinstance(layer, SyncedBatchNorm) for layer in module.modules())


def verify_whole_batch(module: nn.Module, synchronizes: bool, who: str, instead: str) -> None:
    """Refuse statistics that ranks would sum where a process normalises its batch in parts; `who` cuts it there."""
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
