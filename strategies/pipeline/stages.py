"""Place one copy of a module across the devices of a process."""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from ..core.devices import has_streams
from ..core.errors import ConfigError
from ..core.mixed_devices import MixedDevices
from ..core.module_checks import is_compiled
from ..core.patching import replaced
from ..core.side_streams import arrival, cross, from_host, is_plain, work_so_far
from ..core.types import Batch
from ._plan import StagePlan, auto_plan, named_plan, plan_lines
from .module_parts import find_parts, place_parts
from .options import StageOptions


class BatchTensors:
    """The tensors of a batch as they were handed to a step.

    Args:
        ready: the event after which they hold their values; None for the work queued so far.
    """

    def __init__(self, batch: Batch, ready: torch.Event | None = None) -> None:
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and is_plain(leaf)]
        # copied beside the device's work; those of inference mode don't tell whether they were written to
        tensors = [tensor for tensor in tensors if has_streams(tensor.device) and not tensor.is_inference()]
        tensors = [tensor for tensor in tensors if tensor.device == tensors[0].device]  # `ready` says nothing of others
        self._versions = {tensor.untyped_storage().data_ptr(): tensor._version for tensor in tensors}
        self.ready = (ready or work_so_far(tensors[0].device)) if tensors else None

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of the batch, or a view, and was not written to since."""
        if not self._versions or tensor.requires_grad or tensor.layout is not torch.strided or tensor.is_inference():
            return False
        return self._versions.get(tensor.untyped_storage().data_ptr()) == tensor._version


class _OnThread(threading.local):
    """What a thread is at."""

    enter: Callable[[int], None] | None = None
    stage: int = 0
    batch = BatchTensors(None)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """In a copy of a module, whose hooks move inputs as the module's do, no thread is anywhere yet."""
        return _OnThread, ()


class Stages:
    """Runs one module in stages, one per device of a process.

    Args:
        devices: one per stage; devices may repeat.
        options: how to cut the module.
    """

    def __init__(self, devices: Sequence[torch.device], options: StageOptions) -> None:
        self.devices = list(devices)
        self.options = options
        self.plan: StagePlan | None = None
        """The assignment of parts to stages; None before placement."""
        self.hooks: list[RemovableHandle] = []
        """What moves inputs, and measures parts, until `remove`."""
        self._on_thread = _OnThread()
        self._mixed: MixedDevices | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a copy of a module, or of a part of it, takes along with its hooks: no hold on the module itself."""
        return {**vars(self), "hooks": [], "_mixed": None}

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.devices)

    @property
    def overlaps(self) -> bool:
        """Whether stages may have different micro-batches at the same time."""
        return self.options.num_microbatches > 1 and self.num_stages > 1 and self.plan is not None

    @property
    def meeting_stage(self) -> int:
        """The stage that holds the batch, the outputs and the loss."""
        if self.options.output_device == "first":
            return 0
        return self.num_stages - 1 if self.plan is None else self.plan.last_part_stage

    @property
    def meeting_device(self) -> torch.device:
        """The device that holds the batch, the outputs and the loss."""
        return self.devices[self.meeting_stage]

    def place(self, module: LightningModule) -> None:
        """Move each part of the module to its stage's device, and add hooks that move its inputs there."""
        self.remove()
        weights = self.options.device_weights
        if weights is not None and len(weights) != self.num_stages:
            raise ConfigError(
                f"device_weights has {len(weights)} entries for {self.num_stages} stages "
                f"(device_weights={list(weights)}). Give one weight per device of a process."
            )
        self.move(module, self._make_plan(module))

    def move(self, module: LightningModule, plan: StagePlan) -> None:
        """Move each part to its stage of a plan, with its gradients; optimizers' state stays where it is."""
        self.remove()
        self.plan = plan
        place_parts(module, self.device_of_parts(), self.meeting_device)
        module._device = self.meeting_device
        self._add_hooks(module)

    def device_of_parts(self) -> dict[str, torch.device]:
        """The device of each part, by name."""
        assert self.plan is not None, "call place first"
        return {name: self.devices[stage] for name, stage in self.plan.stage_of.items()}

    def lines(self) -> list[str]:
        """Say which modules each stage holds."""
        assert self.plan is not None, "call place first"
        return plan_lines(self.plan, self.devices)

    def tensors(self, module: nn.Module) -> Iterator[tuple[str, Tensor, int]]:
        """Yield name, tensor and stage of each parameter and buffer; a tied tensor once."""
        assert self.plan is not None, "call place first"
        parts = find_parts(module, list(self.plan.stage_of))
        stage_of = {id(tensor): self.plan.stage_of[part.name] for part in reversed(parts) for tensor in part.tensors}
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield name, tensor, stage_of[id(tensor)]

    def modules(self, module: nn.Module) -> list[str]:
        """Names of the parts that are modules, not tensors that an opened module holds itself."""
        assert self.plan is not None, "call place first"
        placed = {part.name for part in find_parts(module, list(self.plan.stage_of)) if not part.loose}
        return [name for name in self.plan.stage_of if name in placed]

    def begin(self) -> None:
        """Let tensors of several stages meet, until `remove`: in steps, in hooks, in optimizers."""
        if self._mixed is None and len(set(self.devices)) > 1:
            self._mixed = MixedDevices(lambda: self.devices, self._moved)
            self._mixed.begin()

    def _moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        [found], arrivals = self._cross(device, [tensor])
        for arrive in arrivals:
            arrive()
        return found

    def remove(self) -> None:
        """Remove the hooks from the module, which stays on its devices."""
        if self._mixed is not None:
            self._mixed.end()
            self._mixed = None
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def _make_plan(self, module: LightningModule) -> StagePlan:
        if not isinstance(self.options.partition, str):
            return named_plan(module, self.num_stages, self.options.partition)
        # weights are speeds where time is balanced; until it is measured, all devices have the same memory
        weights = self.options.device_weights if self.options.balance == "memory" else None
        return auto_plan(module, self.num_stages, self.options.optimizer_copies, weights)

    def _add_hooks(self, module: nn.Module) -> None:
        assert self.plan is not None
        if self.num_stages == 1:
            return
        parts = {name: module.get_submodule(name) for name in self.modules(module)}
        for name, part in parts.items():
            enter = traced_around(module, partial(self._enter, self.plan.stage_of[name]))
            self.hooks.append(part.register_forward_pre_hook(enter, with_kwargs=True))
        for last in list(parts.values())[-1:]:
            self.hooks.append(last.register_forward_hook(traced_around(module, partial(self._meet, 0))))
        # DDP also calls `training_step` through the root module: scalars (losses) stay
        self.hooks.append(module.register_forward_hook(traced_around(module, partial(self._meet, 1))))

    def _enter(self, stage: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Move the inputs of a part to its stage."""
        if not kwargs and all(isinstance(arg, Tensor) for arg in args):  # most calls: torch's trees take longer
            return tuple(self._move(stage, list(args))), kwargs
        return self._bring(stage, (args, kwargs))

    def _meet(self, min_dim: int, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        """Move an output to the meeting device."""
        return self._bring(self.meeting_stage, output, min_dim)

    def _bring(self, stage: int, value: Any, min_dim: int = 0) -> Any:
        if isinstance(value, Tensor):
            return value if value.dim() < min_dim else self._move(stage, [value])[0]
        leaves, spec = tree_flatten(value)
        stays = batch_sizes(value)
        where = [
            i
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.dim() >= min_dim and not any(leaf is one for one in stays)
        ]
        tensors = [leaves[index] for index in where]
        moved = self._move(stage, tensors)
        if moved is tensors:
            return value
        for index, tensor in zip(where, moved, strict=True):
            leaves[index] = tensor
        return tree_unflatten(leaves, spec)

    def _move(self, stage: int, tensors: list[Tensor]) -> list[Tensor]:
        device = self.devices[stage]
        # before the step gives way: what others queue meanwhile is nothing that these copies wait for
        moved, arrivals = self._cross(device, tensors)
        here = self._on_thread
        if here.enter is not None and stage > here.stage:
            here.stage = stage
            here.enter(stage)
        for arrive in arrivals:
            arrive()
        return moved

    def _cross(self, device: torch.device, tensors: list[Tensor]) -> tuple[list[Tensor], list[Callable[[], None]]]:
        """Begin to move tensors, together those that come from one device and are ready at the same time."""
        if all(tensor.device == device for tensor in tensors):
            return tensors, []
        batch = self._on_thread.batch
        groups: dict[tuple[torch.device, bool], list[int]] = {}
        for i, tensor in enumerate(tensors):
            groups.setdefault((tensor.device, batch.holds(tensor)), []).append(i)
        found, arrivals = list(tensors), list[Callable[[], None]]()
        for (_, is_input), places in groups.items():
            moved, arrive = cross([tensors[i] for i in places], device, batch.ready if is_input else None)
            arrivals.append(arrive)
            for i, tensor in zip(places, moved, strict=True):
                found[i] = tensor
        return found, arrivals

    @contextmanager
    def fed(self, chunk: Batch, ready: torch.Event | None = None) -> Generator[Batch]:
        """Copy a micro-batch that waits on the host; inside the block its tensors move as soon as they have arrived.

        Stages of other micro-batches may be queued on the meeting device, for which they need not wait.

        Args:
            ready: the event after which what is on that device holds its values; None for the work queued so far.
        """
        leaves = tree_leaves(chunk)
        if any(leaf.is_cpu if isinstance(leaf, Tensor) else hasattr(leaf, "to") for leaf in leaves):
            device = self.meeting_device
            chunk = from_host(chunk, device)
            are_beside = all(leaf.is_cpu and is_plain(leaf) for leaf in leaves if isinstance(leaf, Tensor))
            ready = arrival(device) if are_beside and not batch_sizes(chunk) else None
        with replaced(self._on_thread, "batch", BatchTensors(chunk, ready)):
            yield chunk

    @contextmanager
    def entering(self, call: Callable[[int], None]) -> Generator[None]:
        """Have a function called, inside the block, before the work on each stage after the first begins."""
        with replaced(self._on_thread, "enter", call), replaced(self._on_thread, "stage", 0):
            yield


def batch_sizes(value: Any) -> list[Tensor]:
    """Those of the packed sequences in a value, which stay on the CPU wherever their data are."""
    leaves = tree_leaves(value, is_leaf=lambda one: isinstance(one, PackedSequence))
    return [leaf.batch_sizes for leaf in leaves if isinstance(leaf, PackedSequence)]


def traced_around(module: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a hook from `torch.compile`: it waits for turns, which can't be traced."""
    return torch.compiler.disable(hook) if is_compiled(module) else hook
