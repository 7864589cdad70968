"""Train one copy of a module that is cut into stages; the base of both model-parallel strategies."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytorch_lightning as pl
import pytorch_lightning.strategies as pl_strategies
import torch
from lightning_fabric.utilities.apply_func import move_data_to_device
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ..batch.outputs import LEFT_OUT, combine_outputs, losses_of
from ..batch.policies import Even, without_single_samples
from ..batch.run_structures import RunStructures
from ..batch.structure import BatchStructure, verify_batch_dims
from ..core.errors import ConfigError
from ..core.module_checks import end_of_step, has_batchnorm, verify_takes_batches
from ..core.patching import replaced
from ..core.types import Batch
from ._microbatches import MicroBatches, MicroBatchLogs
from .layout import StageLayout
from .options import StageOptions


class PipelineStrategy(pl_strategies.Strategy):
    """Mixin for a Lightning strategy: Lightning's handles the processes, this class the devices of each process.

    Args:
        options: how the module is cut into stages, and a batch into micro-batches.
        **kwargs: arguments of the Lightning strategy.
    """

    strategy_name: str

    def __init__(self, options: StageOptions, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stage_options = options
        self._layout: StageLayout | None = None
        self._microbatches: MicroBatches | None = None
        self._logs: MicroBatchLogs | None = None
        self._has_batchnorm = False
        self._told = ""
        self._told_keys: set[str] = set()
        self._logged_losses: list[Tensor] = []
        self.structures = self._new_structures()

    def _new_structures(self) -> RunStructures:
        return RunStructures(verify_batch_dims(self.stage_options.batch_dims, self.strategy_name))

    @property
    def process_devices(self) -> list[torch.device]:
        """The devices of this process, one per stage, the root device first."""
        raise NotImplementedError

    @property
    @override
    def root_device(self) -> torch.device:
        return self.process_devices[0]

    @property
    def layout(self) -> StageLayout:
        """The stages of this process."""
        if self._layout is None or self._layout.devices != self.process_devices:
            self._layout = StageLayout(self.process_devices, self.stage_options)
        return self._layout

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._verify(trainer)
        self.structures = self._new_structures()
        super().setup(trainer)
        for optimizer in self.optimizers:
            state_to_parameters(optimizer)
        module, num = trainer.lightning_module, self.stage_options.num_microbatches
        self._has_batchnorm = has_batchnorm(module)
        self._microbatches = MicroBatches(self.layout, module)
        if self.finishes_later and end_of_step(module) is not None:
            raise ConfigError(
                f"num_microbatches={num}: {type(module).__name__}.training_step_end joins the outputs of "
                "micro-batches, whose backward passes run in threads of their own. Set strategy.deterministic=true, or "
                "num_microbatches=1."
            )
        self._logs = MicroBatchLogs(module, num, self.layout.meeting_device)
        self._log_plan(self.layout.table(module))

    def _verify(self, trainer: pl.Trainer) -> None:
        """Verify the options before anything is placed."""
        module, num = trainer.lightning_module, self.stage_options.num_microbatches
        if num == 1 or trainer.state.fn != TrainerFn.FITTING:
            return
        if not module.automatic_optimization:
            raise ConfigError(
                f"num_microbatches={num} needs automatic optimization, but {type(module).__name__} optimizes manually. "
                "Set num_microbatches=1."
            )
        verify_takes_batches(module, f"num_microbatches={num}", "set num_microbatches=1")

    def _log_plan(self, table: str) -> None:
        """Log the plan, unless it was already logged for the last run."""
        if table != self._told:
            rank_zero_info(f"{type(self.lightning_module).__name__} in {self.layout.num_stages} stages:\n{table}")
        self._told = table

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.layout.place(self.lightning_module)

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None]:
        # on the CPU: a module that needs several devices must not be created on one of them
        with super().tensor_init_context(empty_init), torch.device("cpu"):
            yield

    @override
    def batch_to_device(self, batch: Batch, device: torch.device | None = None, dataloader_idx: int = 0) -> Batch:
        return super().batch_to_device(batch, device or self.layout.meeting_device, dataloader_idx)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # torch moves each state to its parameter's device; Lightning would then move all to the root device
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        module = self.lightning_module
        assert module is not None
        with replaced(module, "training_step", partial(self._training_step, module.training_step)):
            return super().training_step(*args, **kwargs)

    def _training_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's own step, in micro-batches if there are any, and return its loss on the root device."""
        end = end_of_step(self.lightning_module)
        if self.stage_options.num_microbatches == 1:
            output = self._watched(partial(step, *args, **kwargs))
            output = output if end is None else end(output)
            loss = output.get("loss") if isinstance(output, dict) else output
            self._logged_losses = [loss.detach()] if isinstance(loss, Tensor) else []
        else:
            output = self._step_in_microbatches(step, *args, **kwargs)
            assert self._logs is not None
            self._logged_losses = self._logs.losses
        # Lightning, the gradient scaler and DDP expect the loss on the root device
        if not isinstance(output, dict):
            return move_data_to_device(output, self.root_device)
        scalars = {key: output[key] for key in ("loss", "loss_weight") if key in output}  # larger values stay
        return {**output, **move_data_to_device(scalars, self.root_device)}

    def _step_in_microbatches(self, step: Callable[..., Any], batch: Batch, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        sizes, end = self._sizes(batch), end_of_step(self.lightning_module)
        results = self.structures.of_results("training_step")
        if end is not None:
            sizes = [size for size in results.unequal(sizes) if size]
        assert self._microbatches is not None
        assert self._logs is not None
        reduction = self.stage_options.loss_reduction
        if len(sizes) == 1:
            with self._logs.recording():
                output = self._watched(partial(self._logs.run, 0, partial(step, batch, *args, **kwargs)))
            output = output if end is None else end(output)
            lost = output is None
            losses = None if lost else losses_of([output], sizes, reduction, self.strategy_name)
            self._logs.replay(sizes, losses)
            return output
        names = [
            f"micro-batch {i + 1} of {len(sizes)}, {size} of {sum(sizes)} samples," for i, size in enumerate(sizes)
        ]
        chunks = self._batch_structure.split(batch, sizes)
        steps = [partial(step, chunk, *args, **kwargs) for chunk in chunks]
        steps[0] = partial(self._watched, steps[0])
        with self._logs.recording(), self.layout.reading(batch):
            outputs = self._microbatches.forward(names, [partial(self._logs.run, i, s) for i, s in enumerate(steps)])
        if end is not None:
            self._logs.replay(sizes)
            return end(results.join(outputs, sizes, self.layout.meeting_device))
        result, left_out = combine_outputs(
            outputs, sizes, self._logs, reduction, self.strategy_name, self.root_device, results
        )
        for key in left_out:
            self._info_once(LEFT_OUT.format(key=key))
        return result

    @property
    def _batch_structure(self) -> BatchStructure:
        assert self.lightning_module is not None
        return self.structures.of_batch(self.lightning_module.trainer)

    def _info_once(self, message: str) -> None:
        if message not in self._told_keys:
            self._told_keys.add(message)
            rank_zero_info(f"{self.strategy_name}: {message}")

    def _watched(self, call: Callable[[], Any]) -> Any:
        with self.layout.watched():
            return call()

    def _sizes(self, batch: Batch) -> list[int]:
        num = self._batch_structure.num_samples(batch)
        if num is None:
            raise ConfigError(
                f"num_microbatches={self.stage_options.num_microbatches}: the batch of type {type(batch).__name__} "
                "holds nothing to count samples by. Set num_microbatches=1, or give the batch a method split(sizes)."
            )
        sizes = Even().sizes(num, self.stage_options.num_microbatches)
        if self._has_batchnorm:
            sizes = without_single_samples(sizes)
        return [size for size in sizes if size] or [num]

    @property
    def finishes_later(self) -> bool:
        """Whether micro-batches have separate backward passes, which `finish_backward` runs."""
        return self._microbatches is not None and self._microbatches.uses_threads

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if not self.finishes_later:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        # the hooks that follow backward must see the gradients of all micro-batches
        plugin = self.precision_plugin
        with replaced(plugin, "post_backward", partial(self._finish, plugin.post_backward)):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def _finish(self, post_backward: Callable[..., Tensor], *args: Any) -> Tensor:
        self.finish_backward()
        return post_backward(*args)

    def finish_backward(self) -> None:
        """Run the rest of the backward pass, after the backward of the loss."""
        assert self._microbatches is not None
        self._microbatches.finish_backward()

    @override
    def teardown(self) -> None:
        if self._microbatches is not None:
            self._microbatches.shutdown()
        if self._layout is not None:
            self._layout.remove()
        super().teardown()


def state_to_parameters(optimizer: Optimizer) -> None:
    """Move each tensor of an optimizer's state to the device of its parameter; scalars stay on the CPU."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                state[key] = value.to(parameter.device)
