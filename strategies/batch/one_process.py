"""The process side of strategies that train in one process: a layout does the work, and there is nobody to wait for."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import pytorch_lightning as pl
import pytorch_lightning.strategies as pl_strategies
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ..core.errors import ConfigError, PartsDiffer
from ..core.loop_contract import StepContract, evaluation_step, load_states, run_backward, state_to_parameters
from ..core.module_log import restore_logs
from ..core.rng import seed_rank
from ..core.types import Batch, Device
from .evaluation_lists import EvaluationLists
from .exact.loss_reader import LossReader
from .exact.verdict import Views
from .exact.verifier import find_evaluated, verified
from .layout import Layout, OrWhole, WholeSteps, drop_layout
from .meeting import gathered
from .over_batch import verify_no_step_end
from .results import weighs_in_loop
from .run_structures import RunStructures, dataloader_index
from .structure import BatchDims, verify_batch_dims


class OneProcessStrategy(pl_strategies.SingleDeviceStrategy):
    """Runs every step through a layout. A strategy derives from it, and says which layout.

    Args:
        devices: the devices; None takes the trainer's.
        batch_dims: which dimensions of the batch are samples, by path, where that can't be found out.
        verify: find out whether a module trains otherwise in parts of a batch than on the whole one, if these are cut.
        global_view: give such a module whole batches, and one whose batches can't be cut; or refuse it.
    """

    computes_whole: str
    """How steps compute whole batches, for the log."""

    _layer_sync: Any = None
    """What Lightning sets for `sync_batchnorm=True`."""

    def __init__(
        self,
        devices: Sequence[Device] | None,
        batch_dims: BatchDims | None,
        verify: bool = True,
        global_view: OrWhole = "auto",
    ) -> None:
        self._batch_dims = verify_batch_dims(batch_dims, self.strategy_name)
        self.structures = RunStructures(self._batch_dims)
        self._verifies, self._is_verified = verify, False
        self._epoch: int | None = None
        """That of the last step."""
        self._has_changed: Callable[[], bool] | None = None
        """Whether the step computes otherwise than when it was compared."""
        self.global_view = global_view
        self.whole = WholeSteps(self.strategy_name, self.computes_whole, global_view == "auto")
        self.reader = LossReader(self.strategy_name)
        super().__init__(device="cpu")
        self._parallel_devices = [torch.device(device) for device in devices or ()]

    @cached_property
    def layout(self) -> Layout:
        """How this process uses its devices, which are `process_devices`."""
        raise NotImplementedError

    @property
    def module(self) -> pl.LightningModule:
        """The module of the run."""
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices; empty until the trainer has chosen them."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        self._parallel_devices = list(devices)
        drop_layout(self, unless_on=self._parallel_devices)

    @property
    def process_devices(self) -> list[torch.device]:
        """The devices of this process, the root device first."""
        if not self._parallel_devices:
            raise ConfigError(
                f"{self.strategy_name}: the strategy has no devices yet. Give devices=..., or use a Trainer."
            )
        return list(self._parallel_devices)

    @property
    @override
    def root_device(self) -> torch.device:
        return self.process_devices[0]

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self._layer_sync is not None:
            raise ConfigError(
                f"{self.strategy_name}: sync_batchnorm=True synchronizes processes, but there is only one. Set "
                "sync_batchnorm=False, or choose strategy=ddp."
            )
        self.whole.names.clear()
        self.layout.whole = self.whole
        verify_no_step_end(trainer.lightning_module)
        self.layout.verify(trainer)
        self.structures = RunStructures(self._batch_dims, EvaluationLists(self.strategy_name, self._batch_dims))
        super().setup(trainer)
        for optimizer in self.optimizers:
            state_to_parameters(optimizer)
        self.layout.reader = self.reader = LossReader(self.strategy_name)
        self._is_verified = not (self.layout.cut_by or weighs_in_loop(trainer))
        self._epoch, self._has_changed = None, None
        self.layout.begin(trainer, self.structures)

    @override
    def model_to_device(self) -> None:
        self.layout.place(self.module)

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None]:
        with super().tensor_init_context(empty_init), self.layout.creating():
            yield

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        load_states(self.optimizers, checkpoint)

    @property
    def contract(self) -> StepContract:
        """What the strategy does in a step beside Lightning's part."""
        return self

    @property
    def meeting_device(self) -> torch.device:
        """The device that batches are moved to."""
        return self.layout.meeting_device

    @override
    def batch_to_device(self, batch: Batch, device: torch.device | None = None, dataloader_idx: int = 0) -> Batch:
        return super().batch_to_device(batch, device or self.meeting_device, dataloader_idx)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor from all processes, of which there is one."""
        return gathered(tensor, self.strategy_name)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.whole.run("training_step", partial(self._train, *args, **kwargs))

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        reader = self.reader
        reader.begin_step()
        before, self._epoch = self._epoch, self.module.current_epoch
        if self._epoch != before and self._has_changed is not None and self.layout.cut_by:
            self._is_verified = not self._has_changed()
        if not self._is_verified:
            self._is_verified = True
            self._verify(args)
        step = self.layout.step
        if not self.layout.cut_by:
            step = reader.reading(step, 1)
        with self.precision_plugin.train_step_context():
            return step("training_step", *args, **kwargs)

    def _verify(self, args: Sequence[Any]) -> None:
        views, cuts = Views(ranks=False, chunks=True), bool(self.layout.cut_by)
        if not (cuts or weighs_in_loop(self.module.trainer)):  # whole batches, as before it was resumed, say
            return
        try:
            found = verified(self, views, self._verifies and cuts, args)
        except PartsDiffer as exc:
            self.whole.take("training_step", exc)
            if exc.plans and weighs_in_loop(self.module.trainer):
                self.reader.take(exc.plans[0], self.module)
            return
        self._has_changed = found.has_changed
        self.reader.take(found.plans[0], self.module)
        self.reader.values.learn("training_step", 0, found)

    def evaluate(self, step: str, context: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step of evaluation through the layout, in a context of the precision plugin."""
        views = Views(ranks=False, chunks=self.layout.cuts_evaluation(step))
        loader = dataloader_index(self.module.trainer, args[1:])
        with self.whole.where_needed(step):
            find_evaluated(self, views, step, loader, self.whole.allowed, args=args)
        with context():
            return self.whole.run(step, partial(self.layout.step, step, *args, **kwargs))

    validation_step, test_step = evaluation_step("val"), evaluation_step("test")
    predict_step = evaluation_step("predict")

    backward = run_backward
    # the batch and its loss are the global ones, and there are no other ranks
    begin_batch = StepContract.begin_batch
    changes_update, runs_alone = StepContract.changes_update, StepContract.runs_alone
    scale_loss, finish_backward = StepContract.scale_loss, StepContract.finish_backward
    accumulating, stands_in = StepContract.accumulating, StepContract.stands_in
    whole_gradients, restore_gradients = StepContract.whole_gradients, StepContract.restore_gradients

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        self.layout.verify_optimizer_step()
        result = super().optimizer_step(optimizer, closure, *args, **kwargs)
        self.finish_step()
        return result

    def finish_step(self) -> None:
        """Have the layout learn that the optimizer has stepped."""
        self.layout.finish_step()

    @override
    def on_train_start(self) -> None:
        self.layout.weights_changed()
        if not self.module.trainer.fit_loop.restarting:  # a resumed run restores its saved streams
            seed_rank(0, self.process_devices)

    @override
    def on_validation_end(self) -> None:
        self.layout.weights_changed()

    on_predict_start = on_validation_end

    @override
    def on_validation_start(self) -> None:
        self.layout.weights_changed()
        self.structures.lists.begin(self.module)

    on_test_start = on_validation_start

    @override
    def teardown(self) -> None:
        if "layout" in vars(self):
            self.layout.close()
        if self.lightning_module is not None:
            restore_logs(self.lightning_module)
        super().teardown()
