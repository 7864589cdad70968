"""Provide the primitives of data parallelism as differentiable functions on any devices, the CPU included.

Arguments are in the order of `torch.nn.parallel`, where functions refuse the CPU and rebuild their replicas at every
call. `DataParallelStrategy` keeps its replicas instead.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from lightning_fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..batch.policies import Even
from ..batch.structure import BatchStructure, num_samples
from ..core.errors import ConfigError
from ..core.executor import Executor, Piece
from ..core.types import Batch, Chunk, Device, Sizes
from ._module_copy import ModuleCopy


def replicate(network: nn.Module, devices: Sequence[Device], detach: bool = False) -> list[nn.Module]:
    """Copy a module to devices; gradients of the copies flow to the module's parameters.

    Args:
        network: the module.
        devices: one per replica; they may repeat.
        detach: make copies without gradients, as in `torch.no_grad()`.

    Returns:
        One replica per device; its parameters are not leaves, but copies in the graph of the module's.
    """
    detach = detach or not torch.is_grad_enabled()
    root_device = _device_of(network)
    new_parameter = _detached if detach else torch.enable_grad()(_copied)
    return [ModuleCopy(network, root_device, torch.device(device), new_parameter).module for device in devices]


def scatter(
    inputs: Batch, target_gpus: Sequence[Device], dim: int = 0, *, chunk_sizes: Sizes | None = None
) -> list[Chunk]:
    """Cut a batch into chunks, one per device, and move them there.

    Args:
        inputs: nested tensors, each of shape (N, ...).
        target_gpus: the devices, of any type; the name is torch's.
        dim: the dimension to cut along; only 0.
        chunk_sizes: samples per device; they sum to N. None cuts evenly.

    Returns:
        One chunk per device. With fewer samples than devices some chunks are empty, where torch returns fewer chunks.

    Raises:
        ConfigError: the inputs hold no samples or can't be cut, or the sizes don't match.
    """
    if dim != 0:
        raise ConfigError(f"scatter: dim={dim} is not supported; samples lie along dimension 0. Transpose the batch.")
    devices = [torch.device(device) for device in target_gpus]
    structure = BatchStructure(structures=((), (0,)))
    num = structure.num_samples(inputs)
    if num is None:
        raise ConfigError(f"scatter: a value of type {type(inputs).__name__} has no samples to split. Give a tensor.")
    sizes = Even().sizes(num, len(devices)) if chunk_sizes is None else list(chunk_sizes)
    if len(sizes) != len(devices) or sum(sizes) != num or min(sizes) < 0:
        raise ConfigError(
            f"scatter: chunk_sizes={sizes} do not divide {num} samples among {len(devices)} devices. Give one size "
            f"per device, none negative, with sum {num}."
        )
    chunks = structure.split(inputs, sizes)
    return [move_data_to_device(chunk, device) for chunk, device in zip(chunks, devices, strict=True)]


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[Device] | None = None,
) -> list[Any]:
    """Call every module with its inputs: in threads if a device is an accelerator, in order on CPUs.

    Args:
        modules: one per device.
        inputs: a tuple of positional arguments, or one argument, per module.
        kwargs_tup: keyword arguments per module.
        devices: the device of each module; None takes the modules' own.

    Returns:
        The outputs, in order, each on its own device.

    Raises:
        ConfigError: the arguments differ in length.
        Exception: the error of the first module that failed; its message names the chunk and the device.
    """
    kwargs = [{}] * len(modules) if kwargs_tup is None else list(kwargs_tup)
    places = [_device_of(m) for m in modules] if devices is None else [torch.device(device) for device in devices]
    if not len(modules) == len(inputs) == len(kwargs) == len(places):
        raise ConfigError(
            f"parallel_apply: {len(modules)} modules, {len(inputs)} inputs, {len(kwargs)} kwargs_tup and "
            f"{len(places)} devices. Give one of each per module."
        )
    arguments = [given if isinstance(given, tuple) else (given,) for given in inputs]
    pieces = [
        Piece(place, f"chunk {i + 1} of {len(modules)}", partial(m, *args, **kw))
        for i, (place, m, args, kw) in enumerate(zip(places, modules, arguments, kwargs, strict=True))
    ]
    return Executor().run(pieces) if pieces else []


def gather(outputs: Sequence[Any], target_device: Device, dim: int = 0) -> Any:
    """Concatenate the outputs of chunks on one device.

    Args:
        outputs: one per chunk, all of one structure of tensors.
        target_device: device of the result.
        dim: the dimension to concatenate along. Tensors of shape () become one vector, as in torch.

    Returns:
        The structure of one output, with the concatenated tensors.

    Raises:
        ConfigError: a value is not a tensor or a structure of tensors.
    """

    def joined(*values: Any) -> Any:
        if all(isinstance(value, Tensor) for value in values):
            moved = [value.to(target_device) for value in values]
            return torch.cat(moved, dim) if moved[0].dim() else torch.stack(moved)
        if values[0] is None:
            return None
        kind = type(values[0]).__name__
        raise ConfigError(f"gather: an output of type {kind} is not a tensor. Return tensors, or use join.")

    return tree_map(joined, *outputs)


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[Device],
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
    *,
    chunk_sizes: Sizes | None = None,
) -> Any:
    """Call a module on a batch that is divided among devices.

    Args:
        module: the module, on the first device.
        inputs: a tuple of positional arguments, or one argument; tensors of shape (N, ...).
        device_ids: the devices; they may repeat and mix.
        output_device: device that gathers the outputs; None takes the first device.
        dim: the dimension to cut along; only 0.
        module_kwargs: keyword arguments, cut like the inputs.
        chunk_sizes: samples per device; None cuts evenly.

    Returns:
        The module's outputs for all N samples.

    Raises:
        ConfigError: the inputs can't be cut.
    """
    devices = [torch.device(device) for device in device_ids]
    batch = (inputs if isinstance(inputs, tuple) else (inputs,), module_kwargs or {})
    chunks = scatter(batch, devices, dim, chunk_sizes=chunk_sizes)
    used = [i for i, chunk in enumerate(chunks) if num_samples(chunk)]
    places = [devices[i] for i in used]
    replicas = replicate(module, places)
    outputs = parallel_apply(replicas, [chunks[i][0] for i in used], [chunks[i][1] for i in used], places)
    return gather(outputs, devices[0] if output_device is None else output_device, dim)


def _copied(parameter: Tensor, device: torch.device) -> Tensor:
    return parameter.to(device, copy=True)


def _detached(parameter: Tensor, device: torch.device) -> Tensor:
    return _copied(parameter.detach(), device)


def _device_of(module: nn.Module) -> torch.device:
    tensor = next(chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device
