"""Run a module on replicas, one per device of the process: refresh, run, merge metrics, sum gradients."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from ..batch.evaluation_lists import EvaluationLists
from ..batch.exact.loss_reader import LossReader
from ..batch.exact.verdict import Values
from ..batch.log_recorder import LogRecorder
from ..batch.whole.meeting import Meeting
from ..core.devices import is_accelerator, seconds_between, time_mark
from ..core.executor import Executor, Piece
from ..core.module_checks import is_compiled
from ..core.patching import replaced
from ..core.side_streams import from_host
from .replicas import Replicas

Arguments: TypeAlias = tuple[Sequence[Any], dict[str, Any]]
"""Positional and keyword arguments of one call."""

_COMPILATIONS = 8
"""Torch's own limit of compilations per function (torch 2.13), after which it runs without compiling."""


class Measurement:
    """Seconds of the forward pass of each chunk of a step, without synchronizing any device."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._marks: dict[int, tuple[Any, Any]] = {}

    def of(self, pieces: Sequence[Piece], used: Sequence[int], sizes: Sequence[int]) -> list[Piece]:
        """Have the pieces of a step measured, of the devices that are used."""
        self.sizes = list(sizes)
        return [replace(one, call=partial(self._timed, i, one)) for i, one in zip(used, pieces, strict=True)]

    def is_ready(self) -> bool:
        """Whether the step has run and every device has finished its chunk."""
        ends = [end for _, end in self._marks.values()]
        return bool(ends) and all(end.query() for end in ends if isinstance(end, torch.Event))

    def seconds(self) -> list[float]:
        """Those of each device, once they are ready; 0 of one without samples."""
        return [seconds_between(*self._marks[i]) if i in self._marks else 0.0 for i in range(len(self.sizes))]

    def _timed(self, i: int, piece: Piece) -> Any:
        start = time_mark(piece.device)
        result = piece.call()
        self._marks[i] = start, time_mark(piece.device)
        return result


@dataclass(eq=False)
class ReplicaRunner:
    """Runs a method of a module on all devices of a process, and collects state and gradients on the root.

    Args:
        root: the module, on `devices[0]`.
        devices: one per replica; they may repeat and mix.
        threads: run the replicas in threads; None decides by the devices.
        strategy: name that begins messages.
        root_call: called on the root instead of its method; None calls the method.
        lists: joins what evaluation steps append to lists of the module.
        one_by_one: see `ReplicaOptions`.
    """

    root: nn.Module
    devices: Sequence[torch.device]
    threads: bool | None = None
    strategy: str = "dp"
    root_call: Callable[..., Any] | None = None
    lists: EvaluationLists = field(default_factory=EvaluationLists)
    one_by_one: bool = False

    def __post_init__(self) -> None:
        self.replicas = Replicas(self.root, self.devices, self.one_by_one)
        self._executor = Executor(self.threads)
        self._meets: dict[str, bool] = {}
        """By method, whether parts met in the first step; what meets runs in order."""
        self._measurement: Measurement | None = None
        self.has_met = False
        """Whether the replicas have met in the last step."""
        self._attach()

    def measure(self) -> Measurement:
        """Measure the next run."""
        self._measurement = Measurement()
        return self._measurement

    def run(
        self,
        method: str,
        arguments: Sequence[Arguments],
        sizes: Sequence[int],
        reader: LossReader | None = None,
        values: Values | None = None,
        loader: int = 0,
    ) -> list[Any]:
        """Call a method on every replica that has samples.

        Args:
            arguments: positional and keyword arguments per replica; tensors are moved to its device.
            sizes: samples per replica; a replica without samples is not called.
            reader: reads what each replica's loss divides by; None if the method returns none.
            values: how what it logs follows from parts.
            loader: index of the one that the batch is from.

        Returns:
            The results of the replicas that were called, in order, each on its own device.
        """
        if self.replicas.refresh():
            self.logs.close()
            self._attach()
        used = [i for i, size in enumerate(sizes) if size > 0]
        pieces = [self._piece(i, method, arguments[i], sizes, reader) for i in used]
        if self._measurement is not None:
            pieces = self._measurement.of(pieces, used, sizes)
            self._measurement = None
        lists = self._own_lists(method, used, sizes)
        recording = self.logs.recording(values or Values(), method, sizes, loader)
        meeting = Meeting(pieces, [sizes[i] for i in used])
        with recording, lists, meeting, replaced(self.replicas.gate, "is_open", False):
            outputs = self._executor.run(meeting.pieces, self._meets.get(method, True), meeting.state)
        self.has_met = meeting.has_met
        self._meets.setdefault(method, meeting.has_met)
        self.replicas.after_step(used)
        return outputs

    def close(self) -> None:
        """Stop the threads and remove the hooks; the root keeps its state."""
        self._executor.shutdown()
        self.logs.close()

    def _attach(self) -> None:
        """Set up metrics, logs and gradient sums for new replicas."""
        if is_compiled(self.replicas.root):
            allow_recompiling(len(set(self.devices)))
        self.logs = LogRecorder(self.root, self.replicas.modules(), self.devices, self.strategy, self.lists)

    def _piece(
        self, i: int, method: str, arguments: Arguments, sizes: Sequence[int], reader: LossReader | None
    ) -> Piece:
        device = self.devices[i]
        if device != self.devices[0] or is_accelerator(device):  # a batch may be on the host
            arguments = from_host(arguments, device)
        call = self.root_call if i == 0 and self.root_call is not None else getattr(self.replicas[i], method)
        call = call if reader is None else reader.reading(call, sizes[i])
        name = f"chunk {i + 1} of {len(sizes)}, {sizes[i]} of {sum(sizes)} samples,"
        return Piece(device, name, partial(self.logs.run, i, partial(call, *arguments[0], **arguments[1])))

    def _own_lists(self, method: str, used: Sequence[int], sizes: Sequence[int]) -> AbstractContextManager[None]:
        if method not in ("validation_step", "test_step"):
            return nullcontext()
        return self.lists.of_replicas(self.logs.modules, used, [sizes[i] for i in used])


def allow_recompiling(num_devices: int) -> None:
    """Raise torch's limit of compilations, since a function is compiled for each device."""
    from torch._dynamo import config  # takes a second to import, and is there if a module is compiled

    config.recompile_limit = max(config.recompile_limit, _COMPILATIONS * num_devices)
