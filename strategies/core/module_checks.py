"""Properties of a module, and of its hooks, that decide whether and where its batches can be cut."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeGuard

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.model_helpers import is_overridden
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm
from torchmetrics import Metric

from .errors import ConfigError


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The callbacks of a trainer, in the order in which they are called; Lightning does not declare the attribute."""
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]


def has_batchnorm(module: nn.Module) -> bool:
    """Whether the module has a BatchNorm layer, which can't train on a single sample."""
    return any(isinstance(layer, _BatchNorm) for layer in module.modules())


def is_metric(part: nn.Module) -> TypeGuard[Metric]:
    """Whether a module is a metric of torchmetrics; `isinstance` asks an abstract class's 250 derived ones."""
    return Metric in type(part).__mro__


def metrics_of(module: nn.Module) -> list[Metric]:
    """The metrics of torchmetrics within a module, itself included, in the order of its modules."""
    return [part for part in module.modules() if is_metric(part)]


def is_compiler(module: nn.Module) -> bool:
    """Whether a module is what `torch.compile(module)` returns."""
    return type(module).__name__ == "OptimizedModule"  # importing the class would take a second


def is_compiled(module: nn.Module) -> bool:
    """Whether a module, or one in it, is compiled, by `torch.compile(module)` or `module.compile()`."""
    return any(is_compiler(part) or part._compiled_call_impl is not None for part in module.modules())


def not_compiling() -> AbstractContextManager[Any]:
    """Run compiled functions uncompiled inside the block; called in a dispatch mode, they would remain so."""
    is_used = "torch._dynamo" in sys.modules  # which takes a second to import
    return torch.compiler.set_stance("force_eager") if is_used else nullcontext()


def verify_takes_batches(trainer: pl.Trainer, who: str, instead: str) -> None:
    """Refuse a module with a step that reads its own batches, and suggest an alternative to the strategy `who`."""
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        method = getattr(trainer.lightning_module, step)  # None where a module leaves out a step of its base class
        if method is not None and is_param_in_hook_signature(method, "dataloader_iter", explicit=True):
            raise ConfigError(
                f"{who}: {step}(dataloader_iter) reads its own batches, so that nobody knows their samples. "
                f"Use {step}(batch, batch_idx), or {instead}."
            )


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has elements of its own on one device, and counts writes to them."""
    return not is_lazy(tensor) and not tensor.is_meta and not tensor.is_inference() and type(tensor.detach()) is Tensor


def verify_shapes(module: nn.Module) -> None:
    """Refuse parameters without a shape (of `nn.LazyLinear` and the like), which can't be placed or copied."""
    for name, tensor in module.named_parameters():
        if is_lazy(tensor):
            raise ConfigError(f"Parameter {name} has no shape yet, so it can't be placed. Run one forward before fit.")


def verify_unscripted(module: nn.Module) -> None:
    """Refuse modules of TorchScript, whose parameters and hooks can't be replaced."""
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise ConfigError(
                f"{name or type(module).__name__} is compiled by TorchScript (torch.jit), so that it can't be copied "
                "or cut. Give the module that it was made of, or use strategy=ddp."
            )


def has_nan(module: torch.nn.Module) -> bool:
    """Whether parameters of this process, perhaps shards, hold nan, which no later step repairs; waits for devices."""
    found: dict[torch.device, Tensor] = {}
    for parameter in module.parameters():
        if is_lazy(parameter) or not (parameter.is_floating_point() or parameter.is_complex()):
            continue
        whole: Any = parameter.detach()
        local: Tensor = whole.to_local() if hasattr(whole, "to_local") else whole
        # a sum reads the values once, and with a nan among them it is nan
        local = local.float() if local.element_size() == 1 else local  # torch can't sum float8
        nan = local.sum(dtype=torch.float32 if local.element_size() < 4 else None).isnan()
        found[nan.device] = found[nan.device] | nan if nan.device in found else nan
    return any(bool(nan) for nan in found.values())


def verify_takes_parts(module: nn.Module, who: str) -> None:
    """Refuse metrics whose states add up, but not those of the parts of a batch that the ranks of a strategy have."""
    for name, part in module.named_modules():
        reason = ""
        if getattr(part, "data_range", 0) is None and "min_target" not in getattr(part, "_defaults", {}):
            reason = "range from the samples of each update (data_range=None). Pass data_range=(lowest, highest)"
        if any(kind.__name__ == "_AbstractGroupStatScores" for kind in type(part).__mro__):
            reason = "groups from the samples of each update. Compute it with strategy=dp"
        if reason:
            raise ConfigError(
                f"{who}: {type(part).__name__} ({name}) takes its {reason}: each rank has its own samples."
            )


def hooked(name: str, trainer: pl.Trainer, by_user: bool = False) -> bool:
    """Whether the module or a callback of a trainer defines a hook; `by_user` leaves out Lightning's and ours."""
    return is_overridden(name, trainer.lightning_module) or any(
        is_overridden(name, callback, parent=pl.Callback) and (not by_user or is_users(getattr(callback, name)))
        for callback in callbacks_of(trainer)
    )


_STAGES = ("train", "validation", "test", "predict")
_BATCH_HOOKS = tuple(f"on_{stage}_batch_{when}" for stage in _STAGES for when in ("start", "end"))
_TRANSFER_HOOKS = ("transfer_batch_to_device", "on_after_batch_transfer")
_OWN = ("evener.", "pytorch_lightning.", "lightning.pytorch.")
"""Packages whose hooks are known to read no more of a batch than its sizes, and to compute no gradients."""


def is_users(hook: Any) -> bool:
    """Whether a hook is neither Lightning's nor this project's."""
    return hook is not None and not f"{getattr(hook, '__module__', None)}.".startswith(_OWN)


def resting_device(trainer: pl.Trainer, device: torch.device, tell: Callable[[str], None]) -> torch.device:
    """Choose where a batch waits until it is cut: on the host, or on the device if a user's hook receives all of it."""
    owners: list[tuple[Any, tuple[str, ...]]] = [
        (trainer.lightning_module, _BATCH_HOOKS + _TRANSFER_HOOKS),
        (getattr(trainer, "datamodule", None), _TRANSFER_HOOKS),
        *((callback, _BATCH_HOOKS) for callback in callbacks_of(trainer)),
    ]
    for owner, names in owners:
        for name in names:
            if is_users(getattr(owner, name, None)):
                hook = f"{type(owner).__name__}.{name}"
                tell(f"{hook} receives the batch, so all of it is copied to {device} before it is cut.")
                return device
    return torch.device("cpu")


def recompute_weights(module: nn.Module) -> None:
    """Compute the weights that torch's hooks set before each forward: pruning reads them where no step has run, too."""
    for layer in module.modules():
        for hook in layer._forward_pre_hooks.values():
            if isinstance(hook, (BasePruningMethod, WeightNorm)):
                hook(layer, ())
