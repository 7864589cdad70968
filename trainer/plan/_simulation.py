"""Simulate training without data and devices: operations compute only shapes, and bytes are counted.

Source: `torch._subclasses.FakeTensorMode` (PyTorch 2.13).
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from operator import length_hint
from typing import Any, TypeAlias

import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from typing_extensions import override

from ...strategies import ConfigError, SingleDeviceStrategy
from ...strategies.batch.structure import num_samples
from ...strategies.core.patching import replaced
from ...strategies.core.types import Batch
from ...strategies.pipeline.options import StageOptions
from ...strategies.pipeline.recompute import RecomputeOption
from ...strategies.pipeline.stages import Stages
from ...strategies.sharding.optimizer_shards import owners
from ..callbacks.utilization import silence
from ._memory_tracker import MemoryTracker
from ._topology import Shards, StageMemory, Topology, sharded

Questions: TypeAlias = Generator[int, list[StageMemory], Any]
"""A generator that yields numbers of samples, is sent the memory of such a step per stage, and returns its result."""


class SimulatedStages(Stages):
    """Stages without devices: modules stay in place, and tensors that pass from stage to stage are copied."""

    def __init__(self, tracker: MemoryTracker, options: StageOptions) -> None:
        super().__init__([torch.device("cpu")] * len(tracker.live), options)
        self.tracker = tracker

    @override
    def place(self, module: pl.LightningModule) -> None:
        if self.options.partition == "manual":
            raise ConfigError(
                "mode=plan does not support partition=manual, where the module moves its layers itself. Use "
                "mode=compare, which measures, or strategy.partition=auto."
            )
        self.plan = self._make_plan(module)
        self.tracker.home = self.meeting_stage
        self._add_hooks(module)

    @override
    def _move(self, stage: int, tensors: list[Tensor]) -> list[Tensor]:
        return [t if self.tracker.stage_of(t) == stage else self.tracker.copied(t, stage) for t in tensors]


class Finished(Exception):
    """Raised to end the run once all questions are answered; the result is `value`."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class SimulatedStrategy(SingleDeviceStrategy):
    """Trains with fake tensors, one optimizer step for each question about memory.

    Args:
        ask: creates the questions from the number of samples of the loader's batch.
        topology: how the strategy spreads the module.
        options: how the module is cut; no effect with one stage.
        recompute: parts whose activations are recomputed.
        shards_of: how ranks share the parameters of the module; None if each holds them all.
        on_accelerator: whether to emulate accelerators: CUDA's allocation in blocks of 512 bytes, foreach optimizers.
    """

    strategy_name = "simulated"

    def __init__(
        self,
        ask: Callable[[int], Questions],
        topology: Topology,
        options: StageOptions | None,
        recompute: RecomputeOption,
        shards_of: Callable[[nn.Module], Shards] | None,
        on_accelerator: bool,
    ) -> None:
        super().__init__(recompute=recompute)
        self._shards_of, self._num_owners = shards_of, topology.num_owners
        self._shards: Shards | None = None
        self._ask, self._samples = ask, 0
        self._questions: Questions | None = None
        self._num_batches = 0
        self.tracker = MemoryTracker(topology.num_stages, block_bytes=512 if on_accelerator else 1)
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._stages = SimulatedStages(self.tracker, options or StageOptions())
        self._foreach = on_accelerator
        self._active = False
        self._first: Batch | None = None
        self._memory = [StageMemory() for _ in range(topology.num_stages)]

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """The first batch, as many times as the loader has batches, and at least 1000 times."""
        batch = next(iter(dataloader), None)
        if batch is None:
            raise ConfigError("mode=plan: the training loader is empty. Give it at least one batch.")
        return [batch] * max(length_hint(dataloader), 1000)  # a learning rate schedule may use the length of an epoch

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        make_fake(module, self._fake)
        self.recompute.install(module, self._stages.options.partition)
        self._stages.place(module)
        if self._shards_of is None:
            for _, tensor, stage in self._stages.tensors(module):
                self.tracker.track(tensor, stage)
            for stage, memory in enumerate(self._memory):
                memory.parameters = self.tracker.live[stage]
        else:
            self._shards = self._shards_of(module)
            self._memory[0].parameters = sum(self.tracker.size_of(parameter) for parameter in module.parameters())
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._reduced)
        silence(module)
        super().setup_optimizers(trainer)
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        for group in groups:
            if self._foreach and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True  # the default where parameters are on an accelerator

    def _reduced(self, parameter: Tensor) -> None:
        """Count a gradient no longer, once it is complete: what is left of it is a shard."""
        assert parameter.grad is not None
        self.tracker.forget(parameter.grad)

    @override
    def batch_to_device(self, batch: Batch, device: torch.device | None = None, dataloader_idx: int = 0) -> Batch:
        if self._first is None:
            self._first = apply_to_collection(batch, Tensor, self._fake.from_tensor, allow_frozen=True)
        self._answer()
        before = list(self.tracker.live)
        batch = resized(self._first, num_samples(self._first) or 0, self._samples, self._fake)
        apply_to_collection(batch, Tensor, self.tracker.track, self.tracker.home, allow_frozen=True)
        for stage, memory in enumerate(self._memory):
            memory.batch = self.tracker.live[stage] - before[stage]
        return batch

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        before = list(self.tracker.live)
        self.tracker.start_peak()
        with self._simulating():
            output = super().training_step(*args, **kwargs)
        for stage, memory in enumerate(self._memory):
            memory.activations = max(memory.activations, self.tracker.live[stage] - before[stage])
        self._note("forward_peak")
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        self.tracker.start_peak()
        with self._simulating():
            loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        self._note("backward_peak")
        return loss

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        with self._simulating():
            result = super().optimizer_step(optimizer, closure, *args, **kwargs)
        self._note("update_peak")
        return result

    @override
    def teardown(self) -> None:
        """Do not move the module: fake tensors can't be moved to the CPU."""

    def _answer(self) -> None:
        """Answer the last question, if the batches of an optimizer step have passed, and hear the next one."""
        assert self.lightning_module is not None
        each = self.lightning_module.trainer.accumulate_grad_batches
        try:
            if self._questions is None:
                self._questions = self._ask(num_samples(self._first) or 1)
                self._samples = next(self._questions)
            elif self._num_batches % each == 0:
                memory = self._take()
                if self._num_batches > each:  # before, the optimizer has no state yet
                    self._samples = self._questions.send(memory)
        except StopIteration as stop:
            raise Finished(stop.value) from None
        self._num_batches += 1

    def _take(self) -> list[StageMemory]:
        """Return the memory of the last optimizer step per stage, and reset the counters."""
        assert self.lightning_module is not None
        gradients = [p.grad for p in self.lightning_module.parameters() if p.grad is not None]
        states = [value for o in self.optimizers for state in o.state.values() for value in state.values()]
        taken = self._memory
        whole = [memory.parameters for memory in taken]
        for stage, memory in enumerate(taken):
            memory.gradients = self._bytes(gradients, stage)
            memory.optimizer = self._bytes(states, stage)
            memory.owned = self._owned(stage)
        if self._shards is not None:
            taken[0].gradients = sum(self.tracker.size_of(gradient) for gradient in gradients)
            taken[0] = sharded(taken[0], self._shards)
        self._memory = [StageMemory(parameters=size, batch=m.batch) for size, m in zip(whole, taken, strict=True)]
        return taken

    def _owned(self, stage: int) -> tuple[int, ...]:
        """Bytes of the optimizers' state on a stage, by the rank that keeps it."""
        found = [0] * self._num_owners
        for optimizer in self.optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for parameter, owner in zip(parameters, owners(parameters, self._num_owners), strict=True):
                found[owner] += self._bytes(optimizer.state.get(parameter, {}).values(), stage)
        return tuple(found)

    def _bytes(self, values: Iterable[Any], stage: int) -> int:
        tensors = [value for value in values if isinstance(value, Tensor) and self.tracker.stage_of(value) == stage]
        return sum(map(self.tracker.size_of, {t.untyped_storage()._cdata: t for t in tensors}.values()))

    def _note(self, name: str) -> None:
        for stage, memory in enumerate(self._memory):
            setattr(memory, name, max(getattr(memory, name), self.tracker.peak[stage]))
        self.tracker.start_peak()

    @contextmanager
    def _simulating(self) -> Generator[None]:
        if self._active:  # a training step inside an optimizer's step
            yield
            return
        with replaced(self, "_active", True), self._fake, self.tracker:
            yield


def make_fake(module: nn.Module, mode: FakeTensorMode) -> None:
    """Replace every parameter and buffer with a fake tensor; tied ones stay tied."""
    fakes: dict[int, Tensor] = {}
    for part in module.modules():
        for store in (part._parameters, part._buffers):
            tensors: dict[str, Any] = store
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = fakes.setdefault(id(tensor), mode.from_tensor(tensor))


def resized(batch: Batch, num: int, samples: int, mode: FakeTensorMode) -> Batch:
    """Create a batch of another size: new fake tensors, with `samples` rows where the batch has `num`."""

    def resize(tensor: Tensor) -> Tensor:
        rows = samples if tensor.dim() and len(tensor) == num else None
        return tensor.new_empty(tensor.shape if rows is None else (rows, *tensor.shape[1:]))

    with mode:
        return apply_to_collection(batch, Tensor, resize, allow_frozen=True)
