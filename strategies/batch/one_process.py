"""The process side of strategies that train in one process: a layout does the work, and there is nobody to wait for."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import pytorch_lightning as pl
import pytorch_lightning.strategies as pl_strategies
import torch
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ..core.errors import ConfigError
from ..core.loop_contract import StepContract, run_backward
from ..core.module_log import restore_logs
from ..core.optimizer_states import load_states, state_to_parameters
from ..core.patching import replaced
from ..core.private import of_torch
from ..core.rng import seed_rank
from ..core.types import Batch, Device
from .batch_dims import BatchDims, verify_batch_dims
from .checks.loss_check import LossCheck
from .checks.state_watch import StateWatch
from .layout import Layout, drop_layout, evaluation_step
from .run_structures import RunStructures


class OneProcessStrategy(pl_strategies.SingleDeviceStrategy):
    """Runs every step through a layout. A strategy derives from it, and says which layout.

    Args:
        devices: the devices; None takes the trainer's.
        batch_dims: which dimensions of the batch are samples, by path, where that can't be found out.
        verify_loss: refuse a loss that is not the mean over samples, if batches are cut, and state of the module that
            `training_step` computes from a part of the batch.
    """

    def __init__(
        self, devices: Sequence[Device] | None, batch_dims: BatchDims | None, verify_loss: bool = True
    ) -> None:
        self._batch_dims = verify_batch_dims(batch_dims, self.strategy_name)
        self.structures = RunStructures(self._batch_dims)
        self._verifies_loss = verify_loss
        self._loss_check: LossCheck | None = None
        self._states: StateWatch | None = None
        super().__init__(device="cpu")
        self._parallel_devices = [torch.device(device) for device in devices or ()]

    def new_layout(self) -> Layout:
        """Make the layout of `process_devices`."""
        raise NotImplementedError

    @cached_property
    def layout(self) -> Layout:
        """How this process uses its devices."""
        return self.new_layout()

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

    @property
    def _layer_sync(self) -> None:
        """The layer plugin that Lightning sets for `sync_batchnorm=True`."""

    @_layer_sync.setter
    def _layer_sync(self, layer_sync: object) -> None:
        if layer_sync is not None:
            raise ConfigError(
                f"{self.strategy_name}: sync_batchnorm=True synchronizes processes, but there is only one. Set "
                "sync_batchnorm=False, or choose strategy=ddp."
            )

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self.layout.verify(trainer)
        self.structures = RunStructures(self._batch_dims)
        super().setup(trainer)
        for optimizer in self.optimizers:
            state_to_parameters(optimizer)
        self.layout.begin(trainer, self.structures)

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.layout.place(self.lightning_module)

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
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        step = self.layout.step if self._states is None else self._first_step
        with self.precision_plugin.train_step_context():
            return step("training_step", *args, **kwargs)

    def _first_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        module, states = self.lightning_module, self._states
        check, self._loss_check = self._loss_check, None
        assert module is not None
        assert states is not None
        looking = nullcontext() if check is None else check.open(module, self.layout)
        with replaced(self.layout, "states", states), looking:
            output = self.layout.step(name, *args, **kwargs)
        states.close()
        if states.has_ended:
            self._states = None
        if check is not None:
            num = self.structures.of_batch(module.trainer).num_samples(args[0])
            check.tell(check.close(self, num, args, kwargs, nullcontext))
        return output

    def evaluate(self, step: str, context: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step of evaluation through the layout, in a context of the precision plugin."""
        with context():
            return self.layout.step(step, *args, **kwargs)

    validation_step, test_step = evaluation_step("val"), evaluation_step("test")
    predict_step = evaluation_step("predict")

    backward = run_backward
    # the batch and its loss are the global ones, and there are no other ranks
    begin_batch = StepContract.begin_batch
    changes_update, runs_alone = StepContract.changes_update, StepContract.runs_alone
    accumulating, stands_in = StepContract.accumulating, StepContract.stands_in
    whole_gradients, restore_gradients = StepContract.whole_gradients, StepContract.restore_gradients

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Have the backward pass itself complete the gradients, if the module's own `backward` may go on with them."""
        if self.layout.finishes_later and is_overridden("backward", self.lightning_module):
            loss.register_hook(self._finish_in_backward)
        return loss

    def _finish_in_backward(self, gradient: Tensor) -> None:
        of_torch.queue_callback(self.finish_backward)

    def finish_backward(self) -> None:
        """Complete the gradients of the root's parameters."""
        self.layout.finish_backward()

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
        assert self.lightning_module is not None
        self.layout.verify_loaders()
        self.layout.weights_changed()
        is_cut = bool(self.layout.cut_by)
        self._loss_check = LossCheck(self.strategy_name) if self._verifies_loss and is_cut else None
        self._states = StateWatch(self.strategy_name, self._verifies_loss) if is_cut else None
        if not self.lightning_module.trainer.fit_loop.restarting:  # a resumed run restores its saved streams
            seed_rank(0, self.process_devices)

    @override
    def on_validation_start(self) -> None:
        self.layout.weights_changed()

    on_validation_end = on_test_start = on_predict_start = on_validation_start

    @override
    def teardown(self) -> None:
        if "layout" in vars(self):
            self.layout.close()
        if self.lightning_module is not None:
            restore_logs(self.lightning_module)
        super().teardown()
