"""Lay a module out as replicas: a copy per device of the process, every batch cut among them."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities import move_data_to_device
from pytorch_lightning.trainer.states import TrainerFn
from typing_extensions import override

from ..batch.exact.loss_reader import LossReader
from ..batch.exact.verdict import Values
from ..batch.layout import STEPS, Attach, PartsLayout
from ..batch.log_recorder import LogRecorder
from ..batch.meeting import Meeting, Seat, seat
from ..batch.policies import Even, Policy
from ..batch.results import join_evaluated, losses_in
from ..batch.run_structures import RunStructures, dataloader_index
from ..batch.structure import BatchStructure
from ..core.devices import is_accelerator, seconds_between, time_mark
from ..core.errors import ConfigError
from ..core.executor import Executor, Piece
from ..core.module_checks import (
    is_compiled,
    resting_device,
    verify_shapes,
    verify_takes_batches,
    verify_unscripted,
)
from ..core.patching import Replacement
from ..core.transfers import MixedDevices, from_host
from ..core.types import Batch, Chunk
from .replicas import Replicas

_COMPILATIONS = 8
"""Torch's own limit of compilations per function (torch 2.13), after which it runs without compiling."""


@dataclass(frozen=True)
class ReplicaOptions:
    """How a process uses its replicas; DDP, which sees which parameters take part, has these do so `one_by_one`."""

    strategy: str = "dp"
    instead: str = "strategy=ddp"
    submodule: str | None = None
    threads: bool | None = None
    one_by_one: bool = False


class Measurement:
    """Seconds of the forward pass of each chunk of a step, without synchronizing any device."""

    def __init__(self) -> None:
        self.sizes: Sequence[int] = ()
        self._marks: dict[int, tuple[Any, Any]] = {}

    def timed(self, i: int, piece: Piece) -> Any:
        """Run the piece of a device."""
        start = time_mark(piece.device)
        result = piece.call()
        self._marks[i] = start, time_mark(piece.device)
        return result

    def is_ready(self) -> bool:
        """Whether the step has run and every device has finished its chunk."""
        ends = [end for _, end in self._marks.values()]
        return bool(ends) and all(end.query() for end in ends if isinstance(end, torch.Event))

    def seconds(self) -> list[float]:
        """Those of each device, once they are ready; 0 of one without samples."""
        return [seconds_between(*self._marks[i]) if i in self._marks else 0.0 for i in range(len(self.sizes))]


@dataclass
class ReplicaLayout(PartsLayout):
    """Runs every step on all replicas, the root first, and combines what they return to the whole batch's result."""

    devices: list[torch.device]
    options: ReplicaOptions = field(default_factory=ReplicaOptions)
    policy: Policy = field(default_factory=Even)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.strategy = self.options.strategy
        self.num_parts = len(self.devices)
        self._replicas: Replicas | None = None
        self._executor = Executor(self.options.threads)
        self._forward: Replacement | None = None
        """Stands for the forward of a submodule that is replicated alone."""
        self._mixed: MixedDevices | None = None
        self._meets: dict[str, bool] = {}
        """By method, whether parts met in the first step; what meets runs in order."""
        self._measurement: Measurement | None = None
        self.has_met = False
        """Whether the replicas have met in the last step."""

    @property
    @override
    def meeting_device(self) -> torch.device:
        """Where batches wait: the host, from where chunks go to their devices; the root if a hook receives them."""
        root, is_begun = self.devices[0], self._replicas is not None
        if not is_accelerator(root) or len(set(self.devices)) == 1 or not is_begun or self._forward is not None:
            return root
        return resting_device(self.module.trainer, root, self.tell)

    @property
    @override
    def logs(self) -> LogRecorder:
        return self._logs  # which a run makes anew where the module has changed

    @property
    @override
    def cut_by(self) -> str:
        return f"devices_per_process={len(self.devices)}" if self.cuts_evaluation("training_step") else ""

    @override
    def cuts_evaluation(self, step: str) -> bool:
        return self.options.submodule is None and step not in self.whole.names

    @override
    def verify(self, trainer: pl.Trainer) -> None:
        module, options = trainer.lightning_module, self.options
        verify_takes_batches(trainer, options.strategy, options.instead)
        verify_shapes(module)
        if trainer.state.fn != TrainerFn.FITTING or module.automatic_optimization:
            return
        if options.submodule is not None:
            raise ConfigError(
                f"{options.strategy}: manual optimization has whole batches, which submodule={options.submodule} "
                f"would cut. Use {options.instead}, or leave submodule out."
            )
        self.tell(
            f"{type(module).__name__} optimizes manually, so its steps get whole batches, on the first device alone. "
            f"{options.instead} is faster."
        )
        self.whole.names |= STEPS

    @override
    def verify_optimizer_step(self) -> None:
        if isinstance(seat(), Seat):
            raise ConfigError(
                f"{self.strategy}: training_step steps an optimizer, once per replica. Set "
                "automatic_optimization=False, or return the loss and let the trainer step."
            )

    @override
    def begin(self, trainer: pl.Trainer, structures: RunStructures) -> None:
        module, name = trainer.lightning_module, self.options.submodule
        super().begin(trainer, structures)
        self._meets.clear()
        self._measurement = None
        if len(set(self.devices)) > 1:  # what replicas leave behind meets on the root device
            self._mixed = MixedDevices(lambda: self.devices[::-1], stays=True)
            self._mixed.begin()
        part = module if name is None else module.get_submodule(name)
        verify_unscripted(part)
        self._replicas = Replicas(part, self.devices, self.options.one_by_one)
        self._own_forward = part.forward
        self._attach(self._replicas)
        if part is not module:
            inputs = structures.of_inputs(type(part).__name__)
            self._forward = Replacement(part, "forward", partial(self._run_submodule, inputs))

    @override
    def step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "training_step":
            self.weights_changed()  # an optimizer may write to them before it calls its closure, perhaps again (SAM)
        if self._forward is not None:
            return getattr(self._module, name)(*args, **kwargs)
        if name in self.whole.names:
            return self._whole_step(name, *args, **kwargs)
        return self.train_parts(*args) if name == "training_step" else self._evaluation_step(name, *args)

    @override
    def weights_changed(self) -> None:
        assert self._replicas is not None, "the run has not begun"
        self._replicas.mark_changed()

    @override
    def close(self) -> None:
        if self._forward is not None:
            self._forward.remove()
        if self._mixed is not None:
            self._mixed.end()
        if self._replicas is not None:
            self._executor.shutdown()
            self.logs.metrics.close()
        self._replicas = self._forward = self._mixed = None

    @override
    def run_parts(self, chunks: Sequence[Chunk], sizes: Sequence[int], rest: Sequence[Any]) -> tuple[list[Any], Attach]:
        outputs = self._run("training_step", [((chunk, *rest), {}) for chunk in chunks], sizes, reader=self.reader)
        self.reader.scale()
        return outputs, lambda loss: loss  # it is computed of theirs

    def measure(self) -> Measurement:
        """Measure the next step."""
        self._measurement = Measurement()
        return self._measurement

    def _whole_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a step on the first replica, on the whole batch."""
        args = move_data_to_device(args, self.devices[0])  # it may wait on the host
        is_evaluated = name in ("validation_step", "test_step")
        lists = partial(self.structures.lists.of_replicas, self.logs.modules[:1], [0], [1])
        with lists() if is_evaluated else nullcontext():
            output = getattr(self._module, name)(*args, **kwargs)
        if name == "training_step":
            self.losses = losses_in(output) if isinstance(output, dict) else []
        return output

    def _run_submodule(self, inputs: BatchStructure, _: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute a submodule's outputs for the whole batch, on the root device, where the rest of the module runs."""
        given = dict(enumerate(args)) | kwargs
        num = inputs.num_samples(given)
        if not num:
            raise ConfigError(
                f"{self.strategy}: the inputs of submodule={self.options.submodule} hold no tensor with a "
                "dimension, so they can't be split. Choose a submodule that takes the batch."
            )
        results, sizes = self.structures.of_results("submodule"), self.sizes(num)
        chunks = inputs.split(given, sizes)
        arguments = [([own[i] for i in range(len(args))], {name: own[name] for name in kwargs}) for own in chunks]
        outputs = self._run("forward", arguments, sizes, values=Values())
        self.logs.replay(sizes)
        return results.join(outputs, sizes, self.devices[0])

    def _evaluation_step(self, name: str, batch: Batch, *rest: Any) -> Any:
        index = dataloader_index(self.module.trainer, rest)
        results = self.structures.of_results(name, index)
        chunks, sizes = self.cut(batch, index)
        outputs = self._run(name, [((chunk, *rest), {}) for chunk in chunks], sizes, index)
        joined, losses = join_evaluated(outputs, sizes, results, self.devices[0], self.strategy)
        self.logs.replay(sizes, losses)
        return joined

    def _run(
        self, method: str, arguments: Sequence[Any], sizes: Sequence[int], loader: int = 0,
        reader: LossReader | None = None, values: Values | None = None,
    ) -> list[Any]:  # fmt: skip
        """Call a method on every replica that has samples; results are on their devices. No `reader`: no loss."""
        replicas = self._replicas
        assert replicas is not None, "the run has not begun"
        if replicas.refresh():
            self.logs.metrics.close()
            self._attach(replicas)
        used = [i for i, size in enumerate(sizes) if size > 0]
        pieces = [self._piece(replicas, i, method, arguments[i], sizes, reader) for i in used]
        if self._measurement is not None:
            measurement, self._measurement = self._measurement, None
            measurement.sizes = sizes
            calls = [partial(measurement.timed, i, piece) for i, piece in zip(used, pieces, strict=True)]
            pieces = [replace(piece, call=call) for piece, call in zip(pieces, calls, strict=True)]
        own = [sizes[i] for i in used]
        is_evaluated, of_replicas = method in ("validation_step", "test_step"), self.structures.lists.of_replicas
        lists = of_replicas(self.logs.modules, used, own) if is_evaluated else nullcontext()
        recording = self.logs.recording(values or self.reader.values, method, sizes, loader)
        meeting = Meeting(pieces)
        with recording, lists, meeting:
            outputs = self._executor.run(meeting.pieces, self._meets.get(method, True), meeting.state)
        self.has_met = meeting.has_met
        self._meets.setdefault(method, meeting.has_met)
        replicas.after_step(used)
        return outputs

    def _attach(self, replicas: Replicas) -> None:
        """Record what new replicas log."""
        if is_compiled(replicas.root):
            allow_recompiling(len(set(self.devices)))
        self._logs = LogRecorder(replicas.root, replicas.modules(), self.devices, self.strategy)

    def _piece(
        self, replicas: Replicas, i: int, method: str, arguments: Any, sizes: Sequence[int], reader: LossReader | None
    ) -> Piece:
        device = self.devices[i]
        if device != self.devices[0] or is_accelerator(device):  # a batch may be on the host
            arguments = from_host(arguments, device)
        is_replaced = i == 0 and method == "forward"
        call = self._own_forward if is_replaced else getattr(replicas[i], method)
        call = call if reader is None else reader.reading(call, sizes[i])
        name = f"chunk {i + 1} of {len(sizes)}, {sizes[i]} of {sum(sizes)} samples,"
        return Piece(device, name, partial(self.logs.run, i, partial(call, *arguments[0], **arguments[1])))


def allow_recompiling(num_devices: int) -> None:
    """Raise torch's limit of compilations, since a function is compiled for each device."""
    from torch._dynamo import config  # takes a second to import, and is there if a module is compiled

    config.recompile_limit = max(config.recompile_limit, _COMPILATIONS * num_devices)
