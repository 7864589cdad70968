"""Validate the options of torch's DistributedDataParallel, compress its gradients, and make its errors readable."""

import inspect
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, TypeAlias

import pytorch_lightning as pl
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ..core.errors import ConfigError
from ..core.options import Positive, verify_value

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
    why = f"needs one backward pass per step, but with {cut_by} each part of a batch has one" if cut_by else ""
    if not (why or module.automatic_optimization):
        why = "can't be recorded in manual optimization: the module runs the backward passes"
    if why:
        raise ConfigError(f"{strategy}: static_graph=true {why}. Set static_graph=false.")


UNUSED = ": parameters took no part in the loss: "
"""How torch's error goes on after the strategy's name once it is rewritten: a sentence, of a class of torch's."""


def name_unused_parameters(exc: BaseException, parameters: Sequence[tuple[str, Tensor]], strategy: str) -> None:
    """Rewrite torch's error about parameters without gradients, of those it reduces: name them, and what to set."""
    text = str(exc)
    if "Expected to have finished reduction in the prior iteration" not in text:
        return
    indices = re.search(r"did not receive grad for rank \d+: ([\d ,]+)", text)
    named = [parameters[int(i)][0] for i in re.findall(r"\d+", indices[1])] if indices else []
    unused = named or [name for name, parameter in parameters if parameter.grad is None]
    exc.args = (
        f"{strategy}{UNUSED}{', '.join(unused) or 'unknown'}. Set "
        "strategy.find_unused_parameters=true (or strategy.static_graph=true if they are the same in every step), or "
        "freeze them with requires_grad_(False).",
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
