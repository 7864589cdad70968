"""Data parallelism with unequal chunks: a small one for the first device, weighted, or measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import WarningCache
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from .balance.checkpointed import KeptController
from .balance.controller import BalanceController, Hysteresis, Objective
from .balance.ranks import log_shares
from .batch.policies import FirstChunk, Policy, Weighted
from .core.devices import memory_bytes, peak_memory_bytes
from .core.errors import ConfigError
from .core.options import Natural, checked
from .dp import DataParallelStrategy
from .replicas.layout import ReplicaLayout
from .replicas.measurement import Measurement

Auto: TypeAlias = Literal["auto"]
"""Value of an option that is found by measuring."""

FIRST_STEPS, THEN_EVERY = 48, 10
"""Number of first steps that are measured; then one step in as many."""

NUM_MEMORY_STEPS, MEMORY_EVERY = 8, 5
"""Number of first measurements of memory, too; then one measurement in as many, because it takes time."""


@dataclass(frozen=True)
class Measured(Policy):
    """The policy of `auto`: uses the shares of a controller."""

    controller: BalanceController

    @override
    def sizes(self, num_samples: int, num_parts: int) -> list[int]:
        return self.controller.propose(num_samples)


class BalancedDataParallelStrategy(DataParallelStrategy):
    """`DataParallelStrategy` with chunks of unequal size, each loss weighted so that training does not change.

    Give one of `gpu0_chunk` and `weights`. `auto` measures each device's forward time and memory while training, and
    moves samples to less loaded devices; shares are logged as `balance/...` and saved in checkpoints.

    Args:
        gpu0_chunk: samples of the first device, which also holds gradients and optimizer; the others share the rest
            evenly. 0 gives it no samples; `auto` measures.
        weights: share of the batch per device, in any unit; `auto` (default) measures.
        objective: quantity that `auto` equalizes: `time` or `memory`.
        hysteresis: fraction of the largest time or memory that new shares must save to be adopted.
        **options: options of `DataParallelStrategy`.

    Raises:
        ConfigError: both `gpu0_chunk` and `weights` were given.
    """

    strategy_name = "balanced_dp"

    @checked
    def __init__(
        self,
        gpu0_chunk: Natural | Auto | None = None,
        weights: Sequence[float] | Auto | None = None,
        objective: Objective = "time",
        hysteresis: Hysteresis = 0.02,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if gpu0_chunk is not None and weights is not None:
            raise ConfigError(
                f"balanced_dp: gpu0_chunk={gpu0_chunk} and weights={weights} were both given. Give one of them."
            )
        self._gpu0_chunk, self._weights = gpu0_chunk, weights
        self._objective: Objective = objective
        self._hysteresis = hysteresis
        self._kept = KeptController(self.strategy_name, "devices")
        self._pending: Measurement | None = None
        self._num_steps = self._num_measured = 0
        self._told = WarningCache()

    @property
    def controller(self) -> BalanceController | None:
        """Holds measurements and shares; None if nothing is measured."""
        return self._kept.controller

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self.policy = self.make_policy()
        if self._gpu0_chunk is not None and len(self.parallel_devices) == 1:
            rank_zero_info("balanced_dp: with one device gpu0_chunk has no effect: the device takes the whole batch.")
        super().setup(trainer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        self._kept.save(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._kept.load(checkpoint)
        return checkpoint

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        layout = self.layout
        if self.controller is None or not isinstance(layout, ReplicaLayout) or not layout.cuts_steps:
            return super().training_step(*args, **kwargs)
        if self._pending is None and (self._num_steps < FIRST_STEPS or self._num_steps % THEN_EVERY == 0):
            memory = self._num_measured < NUM_MEMORY_STEPS or self._num_measured % MEMORY_EVERY == 0
            self._pending = layout.runner.measure(memory)
            self._num_measured += 1
        self._num_steps += 1
        output = super().training_step(*args, **kwargs)
        if not layout.cuts_steps and layout.options.submodule is None:  # there is nothing to measure
            self._pending = None
            return output
        if layout.runner.has_met:
            self._pending = None
            self._told.info(
                "balanced_dp: the replicas wait for each other within a step (over_batch), so "
                "that their times can't be measured. Set strategy.weights to give them other shares than now."
            )
        self._observe(self.controller, layout)
        assert self.lightning_module is not None
        log_shares(self.lightning_module, self._shown)
        return output

    def make_policy(self) -> Policy:
        """Make the policy of the options for the devices."""
        if isinstance(self._gpu0_chunk, int):
            return FirstChunk(self._gpu0_chunk)
        if self._weights is not None and not isinstance(self._weights, str):
            return Weighted(tuple(self._weights))
        return Measured(self._kept.begin(len(self.parallel_devices), self._new_controller))

    def _new_controller(self) -> BalanceController:
        devices = self.parallel_devices
        limits = [memory_bytes(device) / devices.count(device) for device in devices]
        only_first = self._gpu0_chunk == "auto"
        return BalanceController(
            len(devices), self._objective, self._hysteresis, only_first=only_first, limit_bytes=limits
        )

    def _observe(self, controller: BalanceController, layout: ReplicaLayout) -> None:
        """Pass finished measurements to the controller; an accelerator may be one step late."""
        pending = self._pending
        if pending is None or not pending.is_ready():
            return
        self._pending = None
        seconds = [reading.seconds for reading in pending.readings]
        used = [reading.saved_bytes for reading in pending.readings] if pending.memory else None
        controller.observe(pending.sizes, seconds, used, self._fixed_bytes(layout) if pending.memory else None)

    def _fixed_bytes(self, layout: ReplicaLayout) -> list[float]:
        """Bytes of parameters and gradients per device, plus the optimizer on the first."""
        copies = layout.runner.replicas.parameters()
        sizes = [float(sum(p.nbytes * (2 if p.requires_grad else 1) for p in own)) for own in copies]
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        sizes[0] += sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))
        return sizes

    def _shown(self) -> dict[str, float]:
        """What is logged of the measurements."""
        assert self.controller is not None
        peaks = {f"balance/peak_bytes_{i}": peak_memory_bytes(device) for i, device in enumerate(self.parallel_devices)}
        return self.controller.metrics() | {name: float(peak) for name, peak in peaks.items() if peak is not None}
