"""Run a module on replicas, one per device of the process: refresh, run, merge metrics, sum gradients."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from pytorch_lightning import LightningModule
from torch import nn

from ..batch.checks.state_watch import StateWatch
from ..batch.collected import CollectedLists
from ..batch.log_recorder import LogRecorder
from ..core.devices import is_accelerator
from ..core.executor import Executor, Piece
from ..core.module_checks import is_compiled
from ..core.private import of_torch
from ..core.side_streams import from_host
from ._accumulated_hooks import AccumulatedHooks
from ._attributes import AttributeWatch
from ._gradient_sum import GradientSum
from ._metric_merge import MetricMerger
from .measurement import Measurement, Reading
from .replicas import Replicas, by_device

Arguments: TypeAlias = tuple[Sequence[Any], dict[str, Any]]
"""Positional and keyword arguments of one call."""

_COMPILATIONS = 8
"""Torch's own limit of compilations per function (torch 2.13), after which it runs without compiling."""


class CutsReplicas(Protocol):
    """Cuts replicas into stages (`strategies/pipeline/stages.py`)."""

    def place(self, module: LightningModule) -> None:
        """Place the root on its devices, with hooks that move inputs from stage to stage."""
        ...

    def on_devices(self, devices: Sequence[torch.device]) -> AbstractContextManager[None]:
        """Have the calling thread run the stages on the devices of another replica, inside the block."""
        ...

    def remove(self) -> None:
        """Remove the hooks."""
        ...


@dataclass(eq=False)
class ReplicaRunner:
    """Runs a method of a module on all devices of a process, and collects state and gradients on the root.

    Args:
        root: the module, on `devices[0]`.
        devices: one per replica; they may repeat and mix.
        threads: run the replicas in threads; None decides by the devices.
        strategy: name that begins messages.
        root_call: called on the root instead of its method; None calls the method.
        batch_dims: the strategy's option, which also tells what steps collect in lists of the module.
        blocks: the devices of each replica, where the module is cut into stages; `devices` are the first of each.
        stages: cuts each replica across its block.
    """

    root: nn.Module
    devices: Sequence[torch.device]
    threads: bool | None = None
    strategy: str = "dp"
    root_call: Callable[..., Any] | None = None
    batch_dims: Mapping[str, str] = field(default_factory=dict[str, str])
    blocks: Sequence[Sequence[torch.device]] = ()
    stages: CutsReplicas | None = None

    def __post_init__(self) -> None:
        self.replicas = Replicas(self.root, self.devices, self.blocks)
        self._executor = Executor(self.threads)
        self._measurement: Measurement | None = None
        self._collected = CollectedLists(self.root, self.batch_dims, self.strategy)
        self._attach()

    def measure(self, memory: bool) -> Measurement:
        """Measure the next run.

        Args:
            memory: also count bytes.

        Returns:
            The measurement, which is filled when the devices have finished the run.
        """
        self._measurement = Measurement(memory)
        return self._measurement

    def run(
        self, method: str, arguments: Sequence[Arguments], sizes: Sequence[int], states: StateWatch | None = None
    ) -> list[Any]:
        """Call a method on every replica that has samples.

        Args:
            method: name of the method, `training_step` for example.
            arguments: positional and keyword arguments per replica; tensors are moved to its device.
            sizes: samples per replica; a replica without samples is not called.
            states: watches what each replica does to itself.

        Returns:
            The results of the replicas that were called, in order, each on its own device.
        """
        if self.replicas.refresh():
            self._metrics.close()
            self._hooks.restore()
            self._attach()
        used = [i for i, size in enumerate(sizes) if size > 0]
        self.replicas.before_step(used)
        if torch.is_grad_enabled():
            self._hooks.hold()
        pieces = [self._piece(i, method, arguments[i], sizes) for i in used]
        if states is not None:
            states.begin_call()
            pieces = [
                replace(p, call=partial(self._seen, states, i, p.call)) for i, p in zip(used, pieces, strict=True)
            ]
        if self._measurement is not None:
            pieces = self._measured(self._measurement, pieces, used, sizes)
            self._measurement = None
        self._collected.before_step()
        try:
            with self._attributes.watching(method), self.logs.recording(), self._metrics.standing_in():
                outputs = self._executor.run(pieces)
            self._collected.after_step(method, [sizes[i] for i in used])
        except BaseException:
            self._metrics.discard()
            raise
        if self.replicas.after_step() and torch.is_grad_enabled():
            self._hooks.hold()
        self._metrics.merge(used, [sizes[i] for i in used], outputs)
        return outputs

    def sum_gradients(self) -> None:
        """Add the gradients of all replicas to the root's parameters, and call the hooks that see these."""
        for gradients in self._gradients:
            gradients.collect()
        self._hooks.call()

    def close(self) -> None:
        """Stop the threads and remove the hooks; the root keeps its state."""
        self._executor.shutdown()
        self._hooks.restore()
        for gradients in self._gradients:
            gradients.remove_hooks()
        self._metrics.close()
        self.replicas.close()

    def _attach(self) -> None:
        """Set up metrics, logs and gradient sums for new replicas."""
        if is_compiled(self.replicas.root):
            allow_recompiling(len(set(self.devices)))
        root, *others = self.replicas.parameters()
        self._hooks = AccumulatedHooks(root)
        self._gradients = [
            GradientSum([root[i] for i in group], [[other[i] for i in group] for other in others])
            for group in by_device(root)
        ]
        self._metrics = MetricMerger(self.replicas, self.strategy)
        self.logs = LogRecorder(self.replicas.modules(), self.devices[0], self._metrics.original)
        self._attributes = AttributeWatch(self.replicas, self.strategy)

    def _measured(
        self, measurement: Measurement, pieces: list[Piece], used: list[int], sizes: Sequence[int]
    ) -> list[Piece]:
        measurement.sizes = list(sizes)
        measurement.readings = [Reading() for _ in sizes]
        parameters = self.replicas.parameters()
        measured: list[Piece] = []
        for i, piece in zip(used, pieces, strict=True):
            own = parameters[i] if measurement.memory else None
            call = partial(measurement.readings[i].of, piece.call, piece.device, own)
            measured.append(replace(piece, call=call))
        return measured

    def _piece(self, i: int, method: str, arguments: Arguments, sizes: Sequence[int]) -> Piece:
        device = self.devices[i]
        if device != self.devices[0] or is_accelerator(device):  # a batch may be on the host
            arguments = from_host(arguments, device)
        call = self.root_call if i == 0 and self.root_call is not None else getattr(self.replicas[i], method)
        name = f"chunk {i + 1} of {len(sizes)}, {sizes[i]} of {sum(sizes)} samples,"
        call = partial(self.logs.run, i, partial(call, *arguments[0], **arguments[1]))
        return Piece(device, name, call if self.stages is None else partial(self._call_on_block, i, call))

    def _seen(self, states: StateWatch, i: int, call: Callable[[], Any]) -> Any:
        with states.part(self.replicas[i], by_assignment=False):  # `AttributeWatch` tells of those
            return call()

    def _call_on_block(self, i: int, call: Callable[[], Any]) -> Any:
        assert self.stages is not None
        with self.stages.on_devices(self.blocks[i]):
            return call()


def allow_recompiling(num_devices: int) -> None:
    """Raise torch's limit of compilations, since a function is compiled for each device."""
    known = of_torch.dynamo_config()
    known.recompile_limit = max(known.recompile_limit, _COMPILATIONS * num_devices)
