"""Place one copy of a module across the devices of a process."""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from ..core.devices import has_streams
from ..core.errors import ConfigError
from ..core.module_checks import is_compiled
from ..core.options import Advice, Count, NotNegative, Options, Positive
from ..core.patching import replaced
from ..core.transfers import MixedDevices, arrival, cross, from_host, is_plain, work_so_far
from ..core.types import Batch
from .plan import Plan, auto_plan, find_parts, named_plan, tensors_of

ScheduleName: TypeAlias = Literal["1f1b", "gpipe"]
"""Order of the work on each stage; see `stage_order`."""


@dataclass(frozen=True)
class StageOptions(Options):
    """How a module is cut into stages, and a batch into micro-batches.

    Args:
        partition: `auto` balances memory over contiguous stages; a list names the first module of each stage after
            stage 0.
        num_microbatches: number of micro-batches per training batch, which run on different stages at the same time.
        schedule: order of the micro-batches on each stage. `1f1b` keeps the activations of at most as many of them as
            there are stages; `gpipe` keeps those of all.
        output_device: device of the batch, the module's outputs and the loss: `last` is the device of the module's last
            part (logits stay where they are computed), `first` the root device.
        optimizer_copies: tensors of a parameter's size that the optimizer keeps per trainable parameter: Adam 2, SGD
            with momentum 1, plain SGD 0. Used by `auto`.
        balance: what `auto` balances: `memory`, or `time`: parts are timed in the first steps, and the cut moves once.
        device_weights: relative capacities of unequal devices, one per stage, in what is balanced: memory or speed.
            None takes them for equal.
        deterministic: whether every run must be the same, so that no cut is measured (`balance=time`). None follows
            `torch.use_deterministic_algorithms` (`Trainer(deterministic=True)`).

    Raises:
        ConfigError: an option has an invalid value.
    """

    partition: Annotated[
        Literal["auto"] | Sequence[str], Advice("A list names the first module of each stage after stage 0.")
    ] = "auto"
    num_microbatches: Count = 1
    schedule: ScheduleName = "1f1b"
    output_device: Literal["last", "first"] = "last"
    optimizer_copies: NotNegative = 2
    balance: Literal["memory", "time"] = "memory"
    device_weights: Sequence[Positive] | None = None
    deterministic: bool | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.partition != "auto" and (self.balance != "memory" or self.device_weights is not None):
            raise ConfigError(
                f"balance={self.balance}, device_weights={self.device_weights}: partition={self.partition} says where "
                "the module is cut. Set partition=auto, or leave these out."
            )
        if self.balance == "time" and (self.num_microbatches == 1 or self.deterministic):
            raise ConfigError(
                f"balance=time with num_microbatches={self.num_microbatches}, deterministic={self.deterministic}: "
                "stages wait for each other only with micro-batches, and a measured cut is not the same in every run. "
                "Set num_microbatches=2 or more and deterministic=false, or balance=memory."
            )

    def most_in_flight(self, num_microbatches: int, num_stages: int) -> list[int]:
        """The largest number of micro-batches between forward and backward, by stage."""
        ahead = [num_stages - stage for stage in range(num_stages)]
        return [num_microbatches if self.schedule == "gpipe" else min(num_microbatches, num) for num in ahead]


class _OnThread(threading.local):
    """What a thread is at."""

    enter: Callable[[int], None] | None = None
    stage: int = 0
    versions: dict[int, int] = {}  # noqa: RUF012  # never written to
    """Of the batch that was handed to a step: the version of each tensor, by its storage."""
    ready: torch.Event | None = None
    """After which that batch holds its values."""

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """In a copy of a module, whose hooks move inputs as the module's do, no thread is anywhere yet."""
        return _OnThread, ()


class Stages:
    """Runs one module in stages, one per device of a process; devices may repeat."""

    def __init__(self, devices: Sequence[torch.device], options: StageOptions) -> None:
        self.devices, self.options = list(devices), options
        self.num_stages = len(self.devices)
        self.plan: Plan = {}
        """Empty before placement."""
        self.hooks: list[RemovableHandle] = []
        """What moves inputs, and measures parts, until `remove`."""
        self._on_thread = _OnThread()
        self._mixed: MixedDevices | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a copy of a module, or of a part of it, takes along with its hooks: no hold on the module itself."""
        return {**vars(self), "hooks": [], "_mixed": None}

    @property
    def meeting_stage(self) -> int:
        """The stage that holds the batch, the outputs and the loss: the first, or that of the module's last part."""
        return 0 if self.options.output_device == "first" else [self.num_stages - 1, *self.plan.values()][-1]

    @property
    def meeting_device(self) -> torch.device:
        """The device of the meeting stage."""
        return self.devices[self.meeting_stage]

    def place(self, module: LightningModule) -> None:
        """Move each part of the module to its stage's device, and add hooks that move its inputs there."""
        self.remove()
        options, weights = self.options, self.options.device_weights
        if weights is not None and len(weights) != self.num_stages:
            raise ConfigError(
                f"device_weights has {len(weights)} entries for {self.num_stages} stages "
                f"(device_weights={list(weights)}). Give one weight per device of a process."
            )
        if isinstance(options.partition, str):
            # weights are speeds where time is balanced; until it is measured, all devices have the same memory
            weights = weights if options.balance == "memory" else None
            self.move(module, auto_plan(module, self.num_stages, options.optimizer_copies, weights))
        else:
            self.move(module, named_plan(module, self.num_stages, options.partition))

    def move(self, module: LightningModule, plan: Plan) -> None:
        """Move each part to its stage of a plan, with its gradients; optimizers' state stays where it is."""
        self.remove()
        self.plan = plan
        self._move_parts(module)
        module._device = self.meeting_device
        if self.num_stages == 1:
            return
        compiled = is_compiled(module)

        def outside(hook: Callable[..., Any]) -> Any:
            return torch.compiler.disable(hook) if compiled else hook  # waiting for a turn can't be traced

        parts = {name: module.get_submodule(name) for name in self.modules(module)}
        for name, part in parts.items():
            enter = outside(partial(self._enter, plan[name]))
            self.hooks.append(part.register_forward_pre_hook(enter, with_kwargs=True))
        for last in list(parts.values())[-1:]:
            self.hooks.append(last.register_forward_hook(outside(partial(self._meet, 0))))
        # DDP also calls `training_step` through the root module: scalars (losses) stay
        self.hooks.append(module.register_forward_hook(outside(partial(self._meet, 1))))

    def _move_parts(self, module: LightningModule) -> None:
        """Move the module part by part; it is never on one device as a whole."""
        inside: tuple[str, ...] = ()
        for part in find_parts(module, list(self.plan)):
            owner, device = module.get_submodule(part.name), self.devices[self.plan[part.name]]
            if part.loose:
                owner._apply(partial(Tensor.to, device=device), recurse=False)
            else:
                owner.to(device)
                inside += (f"{part.name}.",)
        for name, child in module.named_modules():  # without parameters, such as metrics, which hold other tensors
            if not tensors_of(child) and not f"{name}.".startswith(inside):
                child.to(self.meeting_device)

    def lines(self) -> list[str]:
        """Say which parts each stage holds."""
        held = [[name or "(root)" for name, at in self.plan.items() if at == i] for i in range(self.num_stages)]
        shown = [names if len(names) < 6 else [*names[:2], "...", *names[-2:]] for names in held]
        return [f"{', '.join(names)} on {device}" for names, device in zip(shown, self.devices, strict=True)]

    def modules(self, module: nn.Module) -> list[str]:
        """Names of the parts that are modules, not tensors that an opened module holds itself."""
        placed = {part.name for part in find_parts(module, list(self.plan)) if not part.loose}
        return [name for name in self.plan if name in placed]

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
        while self.hooks:
            self.hooks.pop().remove()

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
        stays = set(map(id, _batch_sizes(value)))
        tensors = [one for one in leaves if isinstance(one, Tensor) and one.dim() >= min_dim and id(one) not in stays]
        moved = self._move(stage, tensors)
        if moved is tensors:
            return value
        there = dict(zip(map(id, tensors), moved, strict=True))
        return tree_unflatten([there.get(id(leaf), leaf) for leaf in leaves], spec)

    def _move(self, stage: int, tensors: list[Tensor]) -> list[Tensor]:
        # before the step gives way: what others queue meanwhile is nothing that these copies wait for
        moved, arrivals = self._cross(self.devices[stage], tensors)
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
        groups: dict[tuple[torch.device, bool], list[int]] = {}
        for i, tensor in enumerate(tensors):
            groups.setdefault((tensor.device, self._is_of_batch(tensor)), []).append(i)
        found, arrivals = list(tensors), list[Callable[[], None]]()
        for (_, is_of_batch), places in groups.items():
            moved, arrive = cross([tensors[i] for i in places], device, self._on_thread.ready if is_of_batch else None)
            arrivals.append(arrive)
            for i, tensor in zip(places, moved, strict=True):
                found[i] = tensor
        return found, arrivals

    def _is_of_batch(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of the batch, or a view, and was not written to since it was handed to the step."""
        versions = self._on_thread.versions
        if not versions or tensor.requires_grad or tensor.layout is not torch.strided or tensor.is_inference():
            return False
        return versions.get(tensor.untyped_storage().data_ptr()) == tensor._version

    @contextmanager
    def fed(self, chunk: Batch, ready: torch.Event | None = None) -> Generator[Batch]:
        """Copy a micro-batch that waits on the host; inside, its tensors move once they have come (`ready`)."""
        leaves = tree_leaves(chunk)
        if any(leaf.is_cpu if isinstance(leaf, Tensor) else hasattr(leaf, "to") for leaf in leaves):
            chunk = from_host(chunk, self.meeting_device)
            are_beside = all(leaf.is_cpu and is_plain(leaf) for leaf in leaves if isinstance(leaf, Tensor))
            ready = arrival(self.meeting_device) if are_beside and not _batch_sizes(chunk) else None
        # those of inference mode don't tell whether they were written to; `ready` says nothing of other devices
        plain = [leaf for leaf in tree_leaves(chunk) if isinstance(leaf, Tensor) and is_plain(leaf)]
        beside = [leaf for leaf in plain if has_streams(leaf.device) and not leaf.is_inference()]
        beside = [leaf for leaf in beside if leaf.device == beside[0].device]
        versions = {leaf.untyped_storage().data_ptr(): leaf._version for leaf in beside}
        ready = (ready or work_so_far(beside[0].device)) if beside else None
        with replaced(self._on_thread, "versions", versions), replaced(self._on_thread, "ready", ready):
            yield chunk

    @contextmanager
    def entering(self, call: Callable[[int], None]) -> Generator[None]:
        """Have a function called, inside the block, before the work on each stage after the first begins."""
        with replaced(self._on_thread, "enter", call), replaced(self._on_thread, "stage", 0):
            yield


def _batch_sizes(value: Any) -> list[Tensor]:
    """Those of the packed sequences in a value, which stay on the CPU wherever their data are."""
    leaves = tree_leaves(value, is_leaf=lambda one: isinstance(one, PackedSequence))
    return [leaf.batch_sizes for leaf in leaves if isinstance(leaf, PackedSequence)]
