"""Simulate training without data and devices: operations compute only shapes, and bytes are counted.

Source: `torch._subclasses.FakeTensorMode` (PyTorch 2.13).
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from ...strategies.pipeline.stages import Stages
from ...strategies.sharding.optimizer_shards import owners
from ..callbacks.utilization import silence
from ._memory_tracker import MemoryTracker, key_of
from ._topology import StageMemory, Topology, sharded

Questions: TypeAlias = Generator[int, list[StageMemory], Any]
"""A generator that yields numbers of samples, is sent the memory of such a step per stage, and returns its result."""


class SimulatedStages(Stages):
    """Stages of fake tensors, each with a device of its own: `cpu:1` is one that no machine has.

    The stage where the batch and the loss are has the plain CPU, as tensors that are made without a device.
    """

    def __init__(self, num_stages: int, options: StageOptions, fake: FakeTensorMode) -> None:
        super().__init__([torch.device("cpu", stage) for stage in range(num_stages)], options)
        self._fake = fake

    @override
    def place(self, module: pl.LightningModule) -> None:
        """Replace every parameter and buffer with a fake tensor on its stage's device; tied ones stay tied."""
        self.plan = self._make_plan(module)
        self.devices[self.meeting_stage] = torch.device("cpu")
        fakes: dict[int, Tensor] = {}
        for _, tensor, stage in self.tensors(module):
            fake = self._fake.from_tensor(tensor.detach()).to(self.devices[stage])
            is_leaf = isinstance(tensor, nn.Parameter)
            fakes[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_leaf else fake
        for part in module.modules():
            for store in (part._parameters, part._buffers):
                tensors: dict[str, Any] = store
                tensors.update({name: fakes[id(one)] for name, one in tensors.items() if one is not None})
        module._device = self.meeting_device
        self._add_hooks(module)
        self.begin()


class Finished(Exception):
    """Raised, with the result, to end the run once all questions are answered."""


class SimulatedStrategy(SingleDeviceStrategy):
    """Trains with fake tensors, one optimizer step for each question about memory.

    Args:
        ask: creates the questions from the number of samples of the loader's batch.
        topology: how the planned strategy spreads the module.
        on_accelerator: whether to emulate accelerators: CUDA's allocation in blocks of 512 bytes, foreach optimizers.
    """

    strategy_name = "simulated"

    def __init__(self, ask: Callable[[int], Questions], topology: Topology, on_accelerator: bool) -> None:
        super().__init__(recompute=topology.recompute)
        self._ask, self._topology, self._foreach = ask, topology, on_accelerator
        self._questions: Questions | None = None
        self._samples, self._num_batches = 0, 0
        self.tracker = MemoryTracker(block_bytes=512 if on_accelerator else 1)
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._stages = SimulatedStages(topology.num_stages, topology.stages, self._fake)
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
        self.recompute.install(module, self._stages.options.partition)
        self._stages.place(module)
        if self._topology.shards is None:
            for _, tensor, _ in self._stages.tensors(module):
                self.tracker.track(tensor)
        else:
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._reduced)
        for memory, device in self._by_device():
            memory.parameters = self.tracker.live[device]
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

    def _by_device(self) -> Iterator[tuple[StageMemory, torch.device]]:
        return zip(self._memory, self._stages.devices, strict=True)

    @override
    def batch_to_device(self, batch: Batch, device: torch.device | None = None, dataloader_idx: int = 0) -> Batch:
        if self._first is None:
            self._first = apply_to_collection(batch, Tensor, self._fake.from_tensor, allow_frozen=True)
        self._answer()
        before = self.tracker.live.copy()
        batch = resized(self._first, num_samples(self._first) or 0, self._samples, self._fake)
        apply_to_collection(batch, Tensor, self.tracker.track, allow_frozen=True)
        for memory, place in self._by_device():
            memory.batch = self.tracker.live[place] - before[place]
        return batch

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        before = self.tracker.live.copy()
        self.tracker.start_peak()
        with self._simulating():
            output = super().training_step(*args, **kwargs)
        for memory, device in self._by_device():
            memory.activations = max(memory.activations, self.tracker.live[device] - before[device])
        self._note("forward")
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        self.tracker.start_peak()
        with self._simulating():
            loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        self._note("backward")
        return loss

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        with self._simulating():
            result = super().optimizer_step(optimizer, closure, *args, **kwargs)
        self._note("update")
        return result

    @override
    def teardown(self) -> None:
        """Do not move the module: fake tensors can't be moved to the CPU."""
        self._stages.remove()

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
        module = self.lightning_module
        assert module is not None
        parameters = list(module.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        states = [value for o in self.optimizers for state in o.state.values() for value in state.values()]
        taken: list[StageMemory] = []
        for memory, device in self._by_device():
            memory.gradients = self._bytes(gradients, device)
            memory.optimizer = self._bytes(states, device)
            memory.owned = self._owned(device)
            held = memory.static + memory.batch
            extras = (memory.forward - held, memory.backward - held, memory.update - held)
            taken.append(replace(memory, forward=extras[0], backward=extras[1], update=extras[2]))
        self._memory = [StageMemory(parameters=memory.parameters, batch=memory.batch) for memory in taken]
        if self._topology.shards is not None:
            whole, left = (sum(map(self.tracker.size_of, tensors)) for tensors in (parameters, gradients))
            accumulates = module.trainer.accumulate_grad_batches > 1
            held = replace(taken[0], parameters=whole, gradients=left)
            taken[0] = sharded(held, module, self._topology, accumulates)
        return taken

    def _owned(self, device: torch.device) -> tuple[int, ...]:
        """Bytes of the optimizers' state on a device, by the rank that keeps it."""
        found = [0] * self._topology.num_owners
        for optimizer in self.optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for parameter, owner in zip(parameters, owners(parameters, self._topology.num_owners), strict=True):
                found[owner] += self._bytes(optimizer.state.get(parameter, {}).values(), device)
        return tuple(found)

    def _bytes(self, values: Iterable[Any], device: torch.device) -> int:
        """Bytes of those of some values that are counted for a device, a storage once."""
        tensors = [v for v in values if isinstance(v, Tensor) and v.device == device and self.tracker.counts(v)]
        return sum(map(self.tracker.size_of, {key_of(tensor): tensor for tensor in tensors}.values()))

    def _note(self, name: str) -> None:
        for memory, device in self._by_device():
            setattr(memory, name, max(getattr(memory, name), self.tracker.peak[device]))
        self.tracker.start_peak()

    @contextmanager
    def _simulating(self) -> Generator[None]:
        if self._active:  # a training step inside an optimizer's step
            yield
            return
        with replaced(self, "_active", True), self._fake, self.tracker:
            yield


def resized(batch: Batch, num: int, samples: int, mode: FakeTensorMode) -> Batch:
    """Create a batch of another size: new fake tensors, with `samples` rows where the batch has `num`."""

    def resize(tensor: Tensor) -> Tensor:
        rows = samples if tensor.dim() and len(tensor) == num else None
        return tensor.new_empty(tensor.shape if rows is None else (rows, *tensor.shape[1:]))

    with mode:
        return apply_to_collection(batch, Tensor, resize, allow_frozen=True)
