"""Lay a module out as stages: one copy, cut across the devices of the process; a batch may be cut in time."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.apply_func import move_data_to_device
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.model_helpers import is_overridden
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ..batch.layout import Attach, PartsLayout
from ..batch.log_recorder import LogRecorder
from ..batch.policies import Even
from ..batch.results import FOUND, losses_in
from ..batch.run_structures import RunStructures
from ..core.devices import is_accelerator, precise_dtype, seconds_between, time_mark
from ..core.errors import ConfigError
from ..core.executor import ThreadState
from ..core.loop_contract import state_to_parameters, unwrapped
from ..core.module_checks import hooked, resting_device, verify_takes_batches
from ..core.transfers import work_so_far
from ..core.types import Batch, Chunk
from ._gradients import EarlyGradients
from .microbatches import MicroBatches
from .plan import Plan, balanced_plan
from .stages import StageOptions, Stages


@dataclass
class StageLayout(PartsLayout):
    """Runs every step through the stages, one per device, a training step in micro-batches."""

    devices: list[torch.device]
    options: StageOptions = field(default_factory=StageOptions)
    strategy: str = "model_parallel"
    mean_over_ranks: Callable[[Tensor], Tensor] | None = None
    """Averages a tensor, on the root device, over the processes that hold a copy; None for one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.policy, self.num_parts = Even(), self.options.num_microbatches
        self.stages = Stages(self.devices, self.options)
        self._microbatches: MicroBatches | None = None
        self._gets_whole = False
        self._scaler: Any = None
        self._balance: TimeBalance | None = None
        self._clears: bool | None = None
        """Whether all that happens to the gradients of the last step after `training_step` is that they are cleared."""

    @property
    @override
    def meeting_device(self) -> torch.device:
        """Where batches wait: on the host, from where each micro-batch is copied when its turn comes."""
        device = self.stages.meeting_device
        if not self.cut_by or not is_accelerator(device) or self._module is None:
            return device
        return resting_device(self._module.trainer, device, self.tell)

    @property
    @override
    def cut_by(self) -> str:
        num = self.options.num_microbatches
        is_whole = self._gets_whole or "training_step" in self.whole.names
        return f"num_microbatches={num}" if num > 1 and not is_whole else ""

    @override
    def verify(self, trainer: pl.Trainer) -> None:
        module, self._gets_whole = trainer.lightning_module, False
        if not self.cut_by or trainer.state.fn != TrainerFn.FITTING:
            return
        if not module.automatic_optimization:
            self._told.warn(
                f"{self.strategy}: {type(module).__name__} optimizes manually, so all micro-batches would wait for one "
                "another in manual_backward, their graphs in memory. Its steps get whole batches: "
                f"{self.cut_by} has no effect."
            )
            self._gets_whole = True
            return
        is_free = self.options.deterministic is False or not torch.are_deterministic_algorithms_enabled()
        if self.options.balance == "time" and not is_free:
            raise ConfigError(
                "deterministic=true and balance=time: a measured cut is not the same in every run. Set "
                "strategy.balance=memory, or deterministic=false."
            )
        verify_takes_batches(trainer, self.cut_by, "set num_microbatches=1")

    @override
    def creating(self) -> AbstractContextManager[Any]:
        return torch.device("cpu")  # a module that needs several devices must not be created on one of them

    @override
    def place(self, module: pl.LightningModule) -> None:
        self.stages.place(module)

    @override
    def begin(self, trainer: pl.Trainer, structures: RunStructures) -> None:
        super().begin(trainer, structures)
        module = trainer.lightning_module
        self.stages.begin()
        self._new_microbatches()
        scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        is_timed = self.options.balance == "time" and self.stages.num_stages > 1
        self._balance = TimeBalance(module, self.stages, self.mean_over_ranks) if is_timed else None
        self._clears = None
        lines = self.stages.lines()
        self._told.info(f"{type(module).__name__} in {len(lines)} stages: {' | '.join(lines)}")

    @override
    def step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        kinds = {device.type for device in self.devices}
        with nullcontext() if len(kinds) == 1 else ThreadState().autocast_on(kinds):
            return self._step(name, *args, **kwargs)

    def _step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self.options.balance == "time" or name in self.whole.names:  # the batch was perhaps fetched before
            args = move_data_to_device(args, self.meeting_device)
        step = self._fed(name)
        if name != "training_step":
            return step(*args, **kwargs)
        if self.cut_by:  # the last micro-batch is to begin its backward pass without waiting for the root device
            return self.train_parts(*args, **kwargs)
        output = step(*args, **kwargs)
        self.losses = losses_in(output)
        # Lightning, the gradient scaler and DDP expect the loss on the root device
        if not isinstance(output, dict):
            return move_data_to_device(output, self.devices[0])
        scalars = {key: output[key] for key in ("loss", "loss_weight", FOUND) if key in output}  # larger values stay
        return {**output, **move_data_to_device(scalars, self.devices[0])}

    def _fed(self, name: str, ready: torch.Event | None = None) -> Callable[..., Any]:
        """The module's step; on accelerators one that has batches, or micro-batches, copied where they wait."""
        step = getattr(self._module, name)

        def fed(batch: Batch, *args: Any, **kwargs: Any) -> Any:
            with self.stages.fed(batch, ready) as batch:
                return step(batch, *args, **kwargs)

        return fed if self.cut_by and is_accelerator(self.stages.meeting_device) else step

    @override
    def finish_step(self) -> bool:
        moved = None if self._balance is None else self._balance.finish_step()
        if moved is None:
            return False
        self._balance = None
        self._new_microbatches()
        rank_zero_info(moved)
        return True

    def _new_microbatches(self) -> None:
        """Run micro-batches on the stages as they are cut now."""
        if self._microbatches is not None:
            self._microbatches.close()
        self._microbatches = MicroBatches(self.stages, self.module, self.strategy)

    @override
    def close(self) -> None:
        if self._microbatches is not None:
            self._microbatches.close()
        self._microbatches = None
        self.stages.remove()

    @property
    @override
    def logs(self) -> LogRecorder:
        assert self._microbatches is not None
        return self._microbatches.logs

    @override
    def run_parts(self, chunks: Sequence[Chunk], sizes: Sequence[int], rest: Sequence[Any]) -> tuple[list[Any], Attach]:
        assert self._microbatches is not None
        module, num, whole = self.module, len(sizes), sum(sizes)
        names = [f"micro-batch {i + 1} of {num}, {size} of {whole} samples," for i, size in enumerate(sizes)]
        step = self._fed("training_step", work_so_far(self.stages.meeting_device))
        calls = [
            self.reader.reading(partial(step, chunk, *rest), size) for chunk, size in zip(chunks, sizes, strict=True)
        ]
        optimized = [p for o in module.trainer.optimizers for group in o.param_groups for p in group["params"]]
        if self._clears is None:
            self._clears = (
                not hooked("on_before_zero_grad", module.trainer)
                and not is_overridden("optimizer_zero_grad", module)
                and all(type(unwrapped(o)).zero_grad is Optimizer.zero_grad for o in module.trainer.optimizers)
            )
        unread = set(map(id, optimized)) if self._clears and module.trainer.accumulate_grad_batches == 1 else set[int]()
        scale = None if self._scaler is None else self._scaler.scale(torch.ones((), device=self.stages.meeting_device))
        parameters = {id(p): p for p in (*module.parameters(), *optimized)}.values()
        gradients = EarlyGradients(parameters, sizes, self.strategy, scale, unread)
        self.logs.metrics.follow(self.module)
        meet = self.reader.scale if self.reader.plan.needs_all else None
        with self.logs.recording(self.reader.values, "training_step", sizes):
            return self._microbatches.run(names, calls, gradients, meet), gradients.attach

    @override
    def sizes(self, num: int) -> list[int]:
        return [size for size in super().sizes(num) if size]


_FIRST, _LAST = 1, 4
"""Optimizer steps after which measuring begins and ends: the first one prepares memory and kernels."""


class TimeBalance:
    """Measures the forward passes of a module's parts for some steps, and then moves the cut, on all ranks alike."""

    def __init__(
        self, module: pl.LightningModule, stages: Stages, mean_over_ranks: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._module, self._stages, self._mean_over_ranks = module, stages, mean_over_ranks
        self._num_steps = 0
        self._marks: dict[str, list[Any]] = {}
        """By part, where each of its forward passes begins and ends."""

    def finish_step(self) -> str | None:
        """Learn that the optimizer has stepped; tells, once, when all has moved, what was measured and decided."""
        self._num_steps += 1
        for name in self._stages.modules(self._module) if self._num_steps == _FIRST else ():
            self._marks[name] = []
            part, mark = self._module.get_submodule(name), partial(self._mark, name)  # until the stages move
            self._stages.hooks.append(part.register_forward_pre_hook(mark))
            self._stages.hooks.append(part.register_forward_hook(mark, prepend=True))
        return self.move(self._seconds()) if self._num_steps == _LAST else None

    def _mark(self, name: str, *_: Any) -> None:
        if self._module.trainer.training:
            device = self._stages.devices[self._stages.plan[name]]
            self._marks[name].append(time_mark(device))

    def _seconds(self) -> dict[str, float]:
        """Seconds per step by part, of its fastest pass: all else that runs only adds to it; the same on every rank."""
        found: dict[str, float] = {}
        for name, marks in self._marks.items():
            spans = [seconds_between(start, end) for start, end in zip(marks[::2], marks[1::2], strict=True)]
            found[name] = min(spans, default=0.0) * len(spans) / (_LAST - _FIRST)
        if self._mean_over_ranks is None:
            return found
        root = self._stages.devices[0]
        means = self._mean_over_ranks(torch.tensor(list(found.values()), dtype=precise_dtype(root), device=root))
        return dict(zip(found, means.tolist(), strict=True))

    def move(self, seconds: dict[str, float]) -> str:
        """Cut the module so that stages take the same time; tells what was measured and decided."""
        stages, before, parameters = self._stages, self._stages.plan, list(self._module.parameters())
        weights = stages.options.device_weights or [1.0] * stages.num_stages
        work = {name: seconds.get(name, 0.0) * weights[stage] for name, stage in before.items()}

        def ms(plan: Plan) -> str:
            loads = [sum(work[name] for name, at in plan.items() if at == i) / w for i, w in enumerate(weights)]
            return " ".join(f"{load * 1e3:.2f}" for load in loads)

        plan = balanced_plan(self._module, work, weights)
        stages.move(self._module, plan)
        if any(now is not then for now, then in zip(self._module.parameters(), parameters, strict=True)):
            raise ConfigError(
                f"balance=time: torch makes new parameters for other devices ({', '.join(map(str, stages.devices))}), "
                "and optimizers would go on with the old ones. Set balance=memory."
            )
        for optimizer in self._module.trainer.optimizers:
            state_to_parameters(optimizer)
        return (
            f"balance=time: milliseconds of a step's forward passes by stage, {ms(before)} as it was cut by memory, "
            f"{ms(plan)} now: {' | '.join(stages.lines())}"
        )
