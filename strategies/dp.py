"""Train with a copy of the module per device in one process, cutting every batch among them."""

from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from .batch.losses import LossReduction
from .batch.outputs import LEFT_OUT, combine_outputs, losses_of
from .batch.policies import Even, Policy, without_single_samples
from .batch.run_structures import RunStructures, dataloader_index
from .batch.structure import BatchDims, BatchStructure, verify_batch_dims
from .core.errors import ConfigError
from .core.loop_contract import adds
from .core.module_checks import end_of_step, has_batchnorm, verify_takes_batches
from .core.rng import seed_devices
from .core.types import Batch, Device
from .replicas.layout import ReplicaLayout
from .replicas.submodule import ParallelForward, find_submodule
from .single_device import OneProcessStrategy


class DataParallelStrategy(OneProcessStrategy):
    """Train with a replica of the module per device, in one process.

    `training_step` runs on every replica with its chunk of the batch; the losses are combined to the mean of the whole
    batch, and the gradients summed on the root device, which alone has an optimizer. Training equals
    `SingleDeviceStrategy`, except for BatchNorm statistics and random streams (docs/data_parallel.md).

    If a module defines `training_step_end(outputs)`, the replicas' outputs are joined on the root device and passed to
    it; it returns the loss of the whole batch.

    Args:
        devices: one per replica; they may repeat and mix (`["cuda:0", "cpu"]`). None takes the trainer's.
        loss_reduction: reduction of the module's loss: `mean` over samples (or `loss_weight`), or `sum`.
        submodule: dotted name of the submodule to replicate; the rest runs on the root device. None replicates the
            whole module.
        copy_frozen: copy parameters without gradients after every optimizer step, even if nothing is known to have
            written to them; needed only for code that writes to their memory beside torch.
        threads: run replicas in threads; None does so if a device is an accelerator.

    Raises:
        ConfigError: `loss_reduction` is not `mean` or `sum`.
    """

    strategy_name = "dp"
    _without_replicas = "strategy=ddp"

    def __init__(
        self,
        devices: Sequence[Device] | None = None,
        loss_reduction: LossReduction = "mean",
        submodule: str | None = None,
        copy_frozen: bool = False,
        threads: bool | None = None,
        batch_dims: BatchDims | None = None,
    ) -> None:
        if loss_reduction not in get_args(LossReduction):
            raise ConfigError(
                f"{self.strategy_name}: loss_reduction={loss_reduction} is unknown; choose one of mean, sum."
            )
        self._batch_dims = verify_batch_dims(batch_dims, self.strategy_name)
        self.structures = RunStructures(self._batch_dims)
        super().__init__(device="cpu")
        self._parallel_devices: list[torch.device] = []
        if devices is not None:
            self.parallel_devices = [torch.device(device) for device in devices]
        self.policy: Policy = Even()
        self._loss_reduction: LossReduction = loss_reduction
        self._submodule = submodule
        self._threads = threads
        self._copy_frozen = copy_frozen
        self._has_batchnorm = False
        self._told: set[str] = set()
        self._parallel_forward: ParallelForward | None = None
        self._open_batch: Batch = None
        self.layout: ReplicaLayout | None = None

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices, one per replica; empty until the trainer has chosen them."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        self._parallel_devices = list(devices)
        self._root_device = self._parallel_devices[0]

    @property
    def process_devices(self) -> list[torch.device]:
        """The devices of this process, one per replica."""
        return list(self.parallel_devices)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        self._verify(trainer, module)
        self.structures = RunStructures(self._batch_dims)
        super().setup(trainer)
        self.replicate(module)

    def replicate(self, module: pl.LightningModule) -> None:
        """Make the replicas of a module on the root device, if there is more than one device."""
        self._has_batchnorm = has_batchnorm(module)
        if len(self.parallel_devices) > 1:
            self._make_replicas(module)

    @override
    def teardown(self) -> None:
        if self._parallel_forward is not None:
            self._parallel_forward.close()
        elif self.layout is not None:
            self.layout.close()
        self.layout = self._parallel_forward = None
        super().teardown()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self._training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluation_step("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluation_step("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._evaluation_step("predict_step", *args, **kwargs)

    @override
    @adds(then="finish_backward")
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        assert module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        self.finish_backward()  # before `on_after_backward`, which may read the gradients
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def finish_backward(self) -> None:
        """Sum all gradients of the step on the root's parameters."""
        if self.layout is not None:
            self.layout.sum_gradients()

    @override
    @adds(then="finish_step")
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, *args, **kwargs)
        self.finish_step()
        return result

    def finish_step(self) -> None:
        """Have the next step copy what the optimizer has changed to the replicas."""
        self._open_batch = None
        if self.layout is not None:
            self.layout.replicas.mark_changed(frozen=self._copy_frozen)

    @override
    def on_train_start(self) -> None:
        self._verify_loaders()
        self._mark_changed()
        if not self._own_trainer.fit_loop.restarting:  # a resumed run restores its saved streams
            seed_devices(self.parallel_devices)

    @override
    def on_validation_start(self) -> None:
        self._mark_changed()

    @override
    def on_validation_end(self) -> None:
        self._mark_changed()

    @override
    def on_test_start(self) -> None:
        self._mark_changed()

    @override
    def on_predict_start(self) -> None:
        self._mark_changed()

    def _verify_loaders(self) -> None:
        """Refuse loaders for validation, too, before training begins."""
        loop = self._own_trainer.fit_loop
        if self.layout is not None and self._parallel_forward is None:
            self.structures.verify_combined(loop._combined_loader, self._own_trainer.num_training_batches)
            self.structures.verify_combined(loop.epoch_loop.val_loop._combined_loader)

    def _mark_changed(self) -> None:
        """Callbacks that exchange weights (moving averages) do so at these hooks, often through `parameter.data`."""
        self._open_batch = None
        if self.layout is not None:
            self.layout.replicas.mark_changed()

    def _mark_written_in_closure(self, batch: Batch) -> None:
        """See what an optimizer wrote to the weights before it called its closure, perhaps again (SAM).

        The same batch before the step has ended means a further call. Other optimizers than torch's may write before
        the first, too, which matters where earlier batches of an accumulated step have brought the weights over.
        """
        trainer = self._own_trainer
        foreign = trainer.accumulate_grad_batches > 1 and any(
            not type(o).__module__.startswith("torch.optim") for o in trainer.optimizers
        )
        if foreign or batch is self._open_batch:
            self._mark_changed()
        elif trainer.accumulate_grad_batches > 1 and self._copy_frozen and self.layout is not None:
            self.layout.replicas.mark_frozen_changed()  # a moving average may be written between optimizer steps
        self._open_batch = batch

    def _verify(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Refuse, before anything is placed, a module or options that can't be honoured."""
        self.policy.verify(len(self.parallel_devices), self.strategy_name)
        if self._submodule is not None:
            find_submodule(module, self._submodule, self.strategy_name)
        if len(self.parallel_devices) == 1 or trainer.state.fn != TrainerFn.FITTING:
            return
        if not module.automatic_optimization:
            raise ConfigError(
                f"{self.strategy_name}: manual optimization would step the optimizer once per replica. Use "
                f"{self._without_replicas}, or strategy=single_device, or set automatic_optimization=True."
            )
        verify_takes_batches(module, self.strategy_name, self._without_replicas)

    def _make_replicas(self, module: pl.LightningModule) -> None:
        if self._submodule is None:
            self.layout = self._new_layout(module, None)
            return
        part = find_submodule(module, self._submodule, self.strategy_name)
        self._parallel_forward = ParallelForward(
            part, self._new_layout, self._sizes, self.strategy_name, self.structures
        )
        self.layout = self._parallel_forward.layout

    def _new_layout(self, root: nn.Module, root_call: Callable[..., Any] | None) -> ReplicaLayout:
        return ReplicaLayout(
            root, self.parallel_devices, self._threads, self.strategy_name, root_call, self._batch_dims
        )

    def _training_step(self, batch: Batch, *rest: Any) -> Any:
        if self.layout is not None:
            self._mark_written_in_closure(batch)
        if self.layout is None or self._parallel_forward is not None:
            return self._ended(self._call("training_step", batch, *rest))
        structure = self._batch_structure(rest)
        sizes = self._sizes(self._num_samples(batch, structure))
        if self._end is not None:
            sizes = self.structures.of_results("training_step").unequal(sizes)
        chunks = structure.split(batch, sizes)
        outputs = self.layout.run("training_step", [((chunk, *rest), {}) for chunk in chunks], sizes)
        return self._combined(outputs, sizes)

    def _evaluation_step(self, name: str, batch: Batch, *rest: Any) -> Any:
        if self.layout is None or self._parallel_forward is not None:
            return self._call(name, batch, *rest)
        structure = self._batch_structure(rest)
        results = self.structures.of_results(name, dataloader_index(self._own_trainer, rest))
        sizes = results.unequal(self._sizes(self._num_samples(batch, structure)))
        chunks = structure.split(batch, sizes)
        outputs = self.layout.run(name, [((chunk, *rest), {}) for chunk in chunks], sizes)
        losses = None
        if name != "predict_step" and all(_has_loss(output) for output in outputs):
            losses = losses_of(outputs, sizes, self._loss_reduction, self.strategy_name)
        self.layout.logs.replay(sizes, losses)
        joined = results.join(outputs, [size for size in sizes if size > 0], self.root_device)
        return joined if losses is None else _with_loss(joined, losses.combine(self.root_device))

    def _call(self, name: str, *args: Any) -> Any:
        return getattr(self.lightning_module, name)(*args)

    @property
    def _own_trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _batch_structure(self, rest: tuple[Any, ...] = ()) -> BatchStructure:
        trainer = self._own_trainer
        return self.structures.of_batch(trainer, dataloader_index(trainer, rest))

    def _num_samples(self, batch: Batch, structure: BatchStructure) -> int:
        num = structure.num_samples(batch)
        if not num:
            raise ConfigError(
                f"{self.strategy_name}: a batch of type {type(batch).__name__} has no samples to split: it holds no "
                "tensor with rows and no list. Give tensors of shape (samples, ...), or define split(sizes)."
            )
        return num

    def _sizes(self, num: int) -> list[int]:
        """Compute the samples per device of a batch of `num`, by the policy."""
        assert self.lightning_module is not None
        sizes = self.policy.sizes(num, len(self.parallel_devices))
        if not (self._has_batchnorm and self.lightning_module.training and 1 in sizes):
            return sizes
        self._info_once(
            "BatchNorm can't normalise a single sample in training, so chunks of one sample are merged into others."
        )
        return without_single_samples(sizes)

    def _combined(self, outputs: list[Any], sizes: list[int]) -> Any:
        """Combine the outputs of chunks into one result for the whole batch, of the same kind."""
        assert self.layout is not None
        structure = self.structures.of_results("training_step")
        if self._end is not None:
            self.layout.logs.replay(sizes)
            return self._ended(structure.join(outputs, [size for size in sizes if size > 0], self.root_device))
        logs, reduction = self.layout.logs, self._loss_reduction
        result, left_out = combine_outputs(
            outputs, sizes, logs, reduction, self.strategy_name, self.root_device, structure
        )
        for key in left_out:
            self._info_once(LEFT_OUT.format(key=key))
        return result

    @property
    def _end(self) -> Callable[[Any], Any] | None:
        return end_of_step(self.lightning_module)

    def _ended(self, output: Any) -> Any:
        return output if self._end is None else self._end(output)

    def _info_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            rank_zero_info(f"{self.strategy_name}: {message}")


def _has_loss(output: Any) -> bool:
    """Whether an evaluation step returned a loss: a scalar, or a mapping with one."""
    loss = output.get("loss") if isinstance(output, dict) else output
    return isinstance(loss, Tensor) and not loss.dim()


def _with_loss(output: Any, loss: Tensor) -> Any:
    return {**output, "loss": loss} if isinstance(output, dict) else loss
