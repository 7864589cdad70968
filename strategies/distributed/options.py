"""Validate the options of torch's DistributedDataParallel and make its errors readable."""

import inspect
import re
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..core.errors import ConfigError

_OURS = ("module", "device_ids", "output_device", "process_group", "self")


def verified_options(options: dict[str, Any]) -> dict[str, Any]:
    """Check the names of options.

    Returns:
        The options, without those that are None.

    Raises:
        ConfigError: an option is unknown to torch or has no such value, or two of them exclude each other.
    """
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    allowed = [name for name in parameters if name not in _OURS]
    unknown = [name for name in options if name not in allowed]
    if unknown:
        raise ConfigError(f"ddp: {', '.join(unknown)} is no option. Choose from {', '.join(allowed)}.")
    if options.get("static_graph") and options.get("find_unused_parameters"):
        raise ConfigError(
            "ddp: static_graph=true and find_unused_parameters=true were both given. A static graph knows its unused "
            "parameters after the first step: leave find_unused_parameters out."
        )
    for name, value in options.items():
        if isinstance(parameters[name].default, bool) and not isinstance(value, (bool, NoneType)):
            raise ConfigError(f"ddp: {name}={value} is neither true nor false. Give one of them.")
    size = options.get("bucket_cap_mb")
    if size is not None and not (isinstance(size, (int, float)) and size > 0):
        raise ConfigError(f"ddp: bucket_cap_mb={size} is no size. Give MiB, more than 0, or null for torch's 25.")
    return {name: value for name, value in options.items() if value is not None}


def verify_backend(backend: str | None) -> None:
    """Check that torch knows a communication library, and was built with it.

    Args:
        backend: its name, or one for each type of device as torch writes it (`cpu:gloo,cuda:nccl`).

    Raises:
        ConfigError: it is unknown, or not there.
    """
    there = [name for name in dist.Backend.backend_list if _is_built_in(name)]
    for part in backend.split(",") if backend else []:
        if part.rpartition(":")[2].lower() not in there:
            raise ConfigError(
                f"ddp: backend={backend} is not in this build of torch. Give {', '.join(there)}, or null for the one "
                "that suits the devices."
            )


def _is_built_in(name: str) -> bool:
    is_available: Callable[[], bool] | None = getattr(dist, f"is_{name}_available", None)
    return name not in ("undefined", "fake") if is_available is None else is_available()


def name_unused_parameters(exc: BaseException, parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Rewrite torch's error about parameters without gradient: their names, and the override that fixes it.

    Args:
        exc: any error.
        parameters: names and parameters that the wrapper reduces, in its order.
    """
    text = str(exc)
    if "Expected to have finished reduction in the prior iteration" not in text:
        return
    indices = re.search(r"did not receive grad for rank \d+: ([\d ,]+)", text)
    named = [parameters[int(i)][0] for i in re.findall(r"\d+", indices[1])] if indices else []
    unused = named or [name for name, parameter in parameters if parameter.grad is None]
    exc.args = (
        f"ddp: parameters took no part in the loss: {', '.join(unused) or 'unknown'}. Set "
        "strategy.find_unused_parameters=true (strategy.static_graph=true where they are the same in every step), or "
        "freeze them with requires_grad_(False).",
    )
