"""Lay a module out as replicas: a copy per device of the process, every batch cut among them."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities import move_data_to_device
from pytorch_lightning.trainer.states import TrainerFn
from typing_extensions import override

from ..batch.exact.loss_reader import LossReader
from ..batch.layout import STEPS, Attach, PartsLayout
from ..batch.log_recorder import LogRecorder
from ..batch.policies import Even, Policy
from ..batch.results import join_evaluated, losses_in
from ..batch.run_structures import RunStructures, dataloader_index
from ..batch.structure import BatchStructure
from ..batch.whole.meeting import Seat, seat
from ..batch.whole.over_batch import end_of_step, ended
from ..core.devices import is_accelerator
from ..core.errors import ConfigError
from ..core.mixed_devices import MixedDevices
from ..core.module_checks import (
    resting_device,
    verify_shapes,
    verify_takes_batches,
    verify_unscripted,
)
from ..core.patching import Replacement
from ..core.types import Batch, Chunk
from .runner import ReplicaRunner


@dataclass(frozen=True)
class ReplicaOptions:
    """How a process uses its replicas; `DataParallelStrategy` describes the options.

    Args:
        strategy: name that begins messages.
        instead: what to set to have no replicas, for messages.
        submodule: dotted name of the submodule to replicate; None replicates the whole module.
        threads: run replicas in threads; None decides by the devices.
        one_by_one: have each parameter take part in a backward pass by itself, for those who see which do (DDP).
    """

    strategy: str = "dp"
    instead: str = "strategy=ddp"
    submodule: str | None = None
    threads: bool | None = None
    one_by_one: bool = False


@dataclass
class ReplicaLayout(PartsLayout):
    """Runs every step on all replicas and combines what they return to the whole batch's result.

    Args:
        devices: one per replica, the root device first; they may repeat and mix.
        policy: computes the samples per replica.
    """

    devices: list[torch.device]
    options: ReplicaOptions = field(default_factory=ReplicaOptions)
    policy: Policy = field(default_factory=Even)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.strategy = self.options.strategy
        self.num_parts = len(self.devices)
        self._forward: Replacement | None = None
        """Stands for the forward of a submodule that is replicated alone."""
        self._runner: ReplicaRunner | None = None
        self._mixed: MixedDevices | None = None

    @property
    def runner(self) -> ReplicaRunner:
        """Runs calls on the replicas of this run."""
        assert self._runner is not None, "the run has not begun"
        return self._runner

    @property
    @override
    def meeting_device(self) -> torch.device:
        """The host, from where each chunk is copied straight to its device, so that no other holds more than its own.

        It is the root device where a hook of the user's receives the batch and may use it there, where only a submodule
        is replicated, and where there is no other device.
        """
        root = self.devices[0]
        if not is_accelerator(root) or len(set(self.devices)) == 1 or self._runner is None or self._forward is not None:
            return root
        return resting_device(self.module.trainer, root, self.tell)

    @property
    @override
    def logs(self) -> LogRecorder:
        return self.runner.logs  # which a run makes anew where the module has changed

    @property
    @override
    def cut_by(self) -> str:
        return "" if "training_step" in self.whole.names else f"devices_per_process={len(self.devices)}"

    @property
    @override
    def cuts_steps(self) -> bool:
        return self.options.submodule is None and "training_step" not in self.whole.names

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
        module, options = trainer.lightning_module, self.options
        super().begin(trainer, structures)
        if len(set(self.devices)) > 1:  # what replicas leave behind meets on the root device
            self._mixed = MixedDevices(lambda: self.devices[::-1], stays=True)
            self._mixed.begin()
        part = module if options.submodule is None else module.get_submodule(options.submodule)
        verify_unscripted(part)
        root_call = None if part is module else part.forward
        self._runner = ReplicaRunner(
            part, self.devices, options.threads, options.strategy, root_call, structures.lists, options.one_by_one
        )
        if part is not module:
            inputs = structures.of_inputs(type(part).__name__)
            self._forward = Replacement(part, "forward", partial(self._run_submodule, inputs))

    @override
    def step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "training_step":
            self.weights_changed()  # an optimizer may write to them before it calls its closure, perhaps again (SAM)
        if self._forward is not None:
            output = getattr(self._module, name)(*args, **kwargs)
            return ended(self._module, output) if name == "training_step" else output
        if name in self.whole.names:
            return self._whole_step(name, *args, **kwargs)
        return self.train_parts(*args) if name == "training_step" else self._evaluation_step(name, *args)

    @override
    def weights_changed(self) -> None:
        self.runner.replicas.mark_changed()

    @override
    def close(self) -> None:
        if self._forward is not None:
            self._forward.remove()
        if self._mixed is not None:
            self._mixed.end()
        if self._runner is not None:
            self._runner.close()
        self._runner = self._forward = self._mixed = None

    @override
    def run_parts(self, chunks: Sequence[Chunk], sizes: Sequence[int], rest: Sequence[Any]) -> tuple[list[Any], Attach]:
        reader = self.reader if end_of_step(self._module) is None else None
        outputs = self._run("training_step", chunks, sizes, rest, reader=reader)
        if reader is not None:
            reader.scale()
        return outputs, lambda loss: loss  # it is computed of theirs

    def _whole_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a step on the first replica, on the whole batch."""
        args = move_data_to_device(args, self.devices[0])  # it may wait on the host
        is_evaluated = name in ("validation_step", "test_step")
        lists = partial(self.structures.lists.of_replicas, self.logs.modules[:1], [0], [1])
        with lists() if is_evaluated else nullcontext():
            output = getattr(self._module, name)(*args, **kwargs)
        if name == "training_step":
            output = ended(self._module, output)
            self.losses = losses_in(output) if isinstance(output, dict) else []
        return output

    def _run_submodule(self, inputs: BatchStructure, _: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute a submodule's outputs for the whole batch, on the root device, where the rest of the module runs."""
        num = inputs.num_samples((args, kwargs))
        if not num:
            raise ConfigError(
                f"{self.strategy}: the inputs of {type(self.runner.root).__name__} hold no tensor with a "
                "dimension, so they can't be split. Choose a submodule that takes the batch."
            )
        results, sizes = self.structures.of_results("submodule"), self.sizes(num)
        outputs = self.runner.run("forward", inputs.split((args, kwargs), sizes), sizes)
        self.logs.replay(sizes)
        return results.join(outputs, sizes, self.devices[0])

    def _evaluation_step(self, name: str, batch: Batch, *rest: Any) -> Any:
        index = dataloader_index(self.module.trainer, rest)
        results = self.structures.of_results(name, index)
        chunks, sizes = self.cut(batch, index)
        outputs = self._run(name, chunks, sizes, rest, index)
        joined, losses = join_evaluated(outputs, sizes, results, self.devices[0], self.strategy)
        self.logs.replay(sizes, losses)
        return joined

    def _run(
        self, name: str, chunks: Sequence[Chunk], sizes: Sequence[int], rest: Sequence[Any], loader: int = 0,
        reader: LossReader | None = None,
    ) -> list[Any]:  # fmt: skip
        """Run a step on the chunks of a batch."""
        arguments = [((chunk, *rest), {}) for chunk in chunks]
        return self.runner.run(name, arguments, sizes, reader, self.reader.values, loader)
