"""Simulate training without data and devices: torch's `FakeTensorMode` computes shapes only, and bytes are counted."""

import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from ...strategies import ConfigError, SingleDeviceStrategy
from ...strategies.batch.structure import num_samples
from ...strategies.core.patching import replaced
from ...strategies.core.types import Batch
from ...strategies.pipeline.plan import find_parts, tensors_of
from ...strategies.pipeline.stages import StageOptions, Stages
from ..callbacks.step_times import silence
from ._topology import StageMemory, Topology, sharded

LITERAL = "aten::lift_fresh"
"""The operation behind `torch.tensor(1.0)`: optimizers count steps with such scalars, which stay on the CPU."""

Questions: TypeAlias = Generator[int, list[StageMemory], Any]
"""A generator that yields numbers of samples, is sent the memory of such a step per stage, and returns its result."""


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of storages created inside the block, in blocks as the allocator's: live, and their peak."""

    def __init__(self, block_bytes: int = 1) -> None:
        super().__init__()
        self.live, self.peak = Counter[torch.device](), Counter[torch.device]()
        self._block_bytes = block_bytes
        self._known: dict[int, tuple[torch.device, int, weakref.ref[Any]]] = {}

    def track(self, tensor: Tensor) -> None:
        """Count a tensor's storage, if it is not counted yet, until it is freed."""
        if (key := key_of(tensor)) not in self._known:
            device, size = tensor.device, self.size_of(tensor)
            self._known[key] = (device, size, weakref.ref(tensor.untyped_storage(), lambda _: self.forget(key)))
            self.live[device] += size
            self.peak[device] = max(self.peak[device], self.live[device])

    def forget(self, key: int) -> None:
        """Count a storage no longer."""
        if key in self._known:
            device, size, _ = self._known.pop(key)
            self.live[device] -= size

    def size_of(self, *tensors: Tensor, device: torch.device | None = None) -> int:
        """Bytes of the tensors' storages, each once, in whole blocks; those that are counted for a device, if given."""
        sizes = {key_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        if device is not None:
            sizes = {k: size for k, size in sizes.items() if k in self._known and self._known[k][0] == device}
        return sum(-(-size // self._block_bytes) * self._block_bytes for size in sizes.values())

    def start_peak(self) -> None:
        """Reset the peak."""
        self.peak = self.live.copy()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name().startswith(LITERAL) and isinstance(result, Tensor) and not result.dim():
            return result
        given = {key_of(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and key_of(value) not in given:  # else modified in place, or a view
                self.track(value)
        return result


def key_of(tensor: Tensor) -> int:
    """What tensors that share a storage have in common."""
    return tensor.untyped_storage()._cdata


class SimulatedStages(Stages):
    """Stages of fake tensors on devices such as `cpu:1`; that of the batch and the loss has the plain CPU."""

    def __init__(self, num_stages: int, options: StageOptions, fake: FakeTensorMode) -> None:
        super().__init__([torch.device("cpu", stage) for stage in range(num_stages)], options)
        self._fake = fake

    @override
    def _move_parts(self, module: pl.LightningModule) -> None:
        """Replace every parameter and buffer with a fake tensor on its stage's device; tied ones stay tied."""
        self.devices[self.meeting_stage] = torch.device("cpu")
        parts = find_parts(module, list(self.plan))
        stage_of = {id(tensor): self.plan[part.name] for part in reversed(parts) for tensor in part.tensors}
        fakes: dict[int, Tensor] = {}
        for tensor in tensors_of(module):
            fake = self._fake.from_tensor(tensor.detach()).to(self.devices[stage_of[id(tensor)]])
            is_leaf = isinstance(tensor, nn.Parameter)
            fakes[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_leaf else fake
        for part in module.modules():
            for store in (part._parameters, part._buffers):
                tensors: dict[str, Any] = store
                tensors.update({name: fakes[id(one)] for name, one in tensors.items() if one is not None})


class Finished(Exception):
    """Raised, with the result, to end the run once all questions are answered."""


class SimulatedStrategy(SingleDeviceStrategy):
    """Trains with fake tensors, an optimizer step for each question; `on_accelerator` in CUDA's blocks, foreach."""

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

    def _by_device(self) -> Iterator[tuple[StageMemory, torch.device]]:
        return zip(self._memory, self._stages.devices, strict=True)

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
        self._stages.begin()
        for tensor in tensors_of(module):
            if self._topology.shards is None:
                self.tracker.track(tensor)
            elif tensor.requires_grad:  # what is left of a gradient, once it is complete, is a shard
                tensor.register_post_accumulate_grad_hook(self._reduced)
        for memory, device in self._by_device():
            memory.parameters = self.tracker.live[device]
        silence(module)
        super().setup_optimizers(trainer)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            if self._foreach and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True  # the default where parameters are on an accelerator

    def _reduced(self, parameter: Any) -> None:
        self.tracker.forget(key_of(parameter.grad))

    @override
    def batch_to_device(self, batch: Batch, device: torch.device | None = None, dataloader_idx: int = 0) -> Batch:
        if self._first is None:
            self._first = apply_to_collection(batch, Tensor, self._fake.from_tensor, allow_frozen=True)
        self._answer()
        before = self.tracker.live.copy()
        num = num_samples(self._first) or 0

        def resize(tensor: Tensor) -> Tensor:
            rows = self._samples if tensor.dim() and len(tensor) == num else None
            return tensor.new_empty(tensor.shape if rows is None else (rows, *tensor.shape[1:]))

        with self._fake:
            batch = apply_to_collection(self._first, Tensor, resize, allow_frozen=True)
        apply_to_collection(batch, Tensor, self.tracker.track, allow_frozen=True)
        for memory, place in self._by_device():
            memory.batch = self.tracker.live[place] - before[place]
        return batch

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        before = self.tracker.live.copy()
        with self._phase("forward"):
            output = super().training_step(*args, **kwargs)
        for memory, device in self._by_device():
            memory.activations = max(memory.activations, self.tracker.live[device] - before[device])
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        with self._phase("backward"):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        with self._phase("update"):
            return super().optimizer_step(optimizer, closure, *args, **kwargs)

    @contextmanager
    def _phase(self, name: str) -> Generator[None]:
        """Simulate inside the block, and note its peak; one that begins within another ends the peak of that."""
        self.tracker.start_peak()
        modes = () if self._active else (replaced(self, "_active", True), self._fake, self.tracker)
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            yield
        for memory, device in self._by_device():
            setattr(memory, name, max(getattr(memory, name), self.tracker.peak[device]))
        self.tracker.start_peak()

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
                memory = self._take(self.lightning_module)
                if self._num_batches > each:  # before, the optimizer has no state yet
                    self._samples = self._questions.send(memory)
        except StopIteration as stop:
            raise Finished(stop.value) from None
        self._num_batches += 1

    def _take(self, module: pl.LightningModule) -> list[StageMemory]:
        """Return the memory of the last optimizer step per stage, and reset the counters."""
        parameters = list(module.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        values = (value for one in self.optimizers for state in one.state.values() for value in state.values())
        states = [value for value in values if isinstance(value, Tensor)]
        taken: list[StageMemory] = []
        for memory, device in self._by_device():
            memory.gradients = self.tracker.size_of(*gradients, device=device)
            memory.optimizer = self.tracker.size_of(*states, device=device)
            held = memory.static + memory.batch
            extras = {name: getattr(memory, name) - held for name in ("forward", "backward", "update")}
            taken.append(replace(memory, **extras))
        self._memory = [StageMemory(parameters=memory.parameters, batch=memory.batch) for memory in taken]
        if self._topology.shards is not None:
            held = replace(
                taken[0], parameters=self.tracker.size_of(*parameters), gradients=self.tracker.size_of(*gradients)
            )
            taken[0] = sharded(held, module, self._topology, module.trainer.accumulate_grad_batches > 1)
        return taken
