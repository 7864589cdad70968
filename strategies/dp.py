"""Train with a copy of the module per device in one process, cutting every batch among them."""

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any

import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import WarningCache
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from .balance.controller import BalanceController, Hysteresis
from .balance.ranks import Weights, log_shares
from .batch.layout import Layout, OrWhole, drop_layout
from .batch.one_process import OneProcessStrategy
from .batch.policies import Even, FirstChunk, Policy, Weighted
from .batch.structure import BatchDims
from .core.errors import ConfigError, verify_submodules
from .core.options import Advice, Natural, checked
from .core.types import Device
from .pipeline.recompute import Recompute, RecomputeOption, verify_threads
from .replicas.layout import Measurement, ReplicaLayout, ReplicaOptions


class DataParallelStrategy(OneProcessStrategy):
    """Train with a replica of the module per device, in one process.

    `training_step` runs on every replica with its chunk of the batch; the losses are combined to the mean of the whole
    batch, and the gradients summed on the root device, which alone has an optimizer. Training equals
    `SingleDeviceStrategy`, except for BatchNorm statistics and random streams (docs/data_parallel.md).

    A loss over the batch is computed on the root device, by `evener.over_batch`. In
    manual optimization steps get whole batches, on the first device alone.

    Args:
        devices: one per replica; they may repeat and mix (`["cuda:0", "cpu"]`). None takes the trainer's.
        submodule: dotted name of the submodule to replicate; the rest runs on the root device. None replicates the
            whole module.
        threads: run replicas in threads; None does so if a device is an accelerator.
        batch_dims: which dimensions of the batch are samples, by path, where that can't be found out.
        recompute: parts of the module whose activations are computed once more in the backward pass: `never`,
            `always`, `except_last`, or names of submodules.
        verify: as in `DDPStrategy`.
        global_view: give a module that trains otherwise in parts of a batch, or whose batches can't be cut, whole ones,
            on the first device alone (`auto`); False refuses it.

    Raises:
        ConfigError: an option has an invalid value.
    """

    strategy_name = "dp"
    computes_whole = "on the first device alone"

    @checked
    def __init__(
        self,
        devices: Sequence[Device] | None = None,
        submodule: str | None = None,
        threads: bool | None = None,
        batch_dims: BatchDims | None = None,
        recompute: RecomputeOption = "never",
        verify: bool = True,
        global_view: OrWhole = "auto",
    ) -> None:
        super().__init__(devices, batch_dims, verify, global_view)
        self.replica_options = ReplicaOptions(self.strategy_name, "strategy=ddp", submodule, threads)
        self.policy: Policy = Even()
        self.recompute = Recompute(recompute, self.strategy_name)

    @cached_property
    @override
    def layout(self) -> Layout:
        devices = self.process_devices
        return Layout(devices) if len(devices) == 1 else ReplicaLayout(devices, self.replica_options, self.policy)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self.policy.verify(len(self.process_devices), self.strategy_name)
        if self.replica_options.submodule is not None:
            option, name = f"{self.strategy_name}: submodule", self.replica_options.submodule
            verify_submodules(option, [name], trainer.lightning_module)
        if self.recompute.is_on:
            verify_threads(self.process_devices, self.replica_options.threads, self.strategy_name)
        self.recompute.begin(trainer)
        drop_layout(self)  # the policy may be another one than in an earlier run
        super().setup(trainer)

    @override
    def teardown(self) -> None:
        super().teardown()
        self.recompute.end()


FIRST_STEPS, THEN_EVERY = 48, 10
"""Number of first steps that are measured; then one step in as many."""


class BalancedDataParallelStrategy(DataParallelStrategy):
    """`DataParallelStrategy` with chunks of unequal size, each loss weighted so that training does not change.

    Give one of `gpu0_chunk` and `weights`. `auto` measures each device's forward time while training, and moves samples
    to faster devices; shares are logged as `balance/...` and saved in checkpoints.

    Args:
        gpu0_chunk: samples of the first device, which also holds gradients and optimizer; the others share the rest
            evenly. 0 gives it no samples.
        weights: share of the batch per device, in any unit; `auto` (default) measures.
        hysteresis: fraction of the largest time that new shares must save to be adopted.
        **options: options of `DataParallelStrategy`.

    Raises:
        ConfigError: both `gpu0_chunk` and `weights` were given.
    """

    strategy_name = "balanced_dp"

    @checked
    def __init__(
        self,
        gpu0_chunk: Annotated[Natural | None, Advice("weights=auto measures.")] = None,
        weights: Weights | None = None,
        hysteresis: Hysteresis = 0.02,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if gpu0_chunk is not None and weights is not None:
            raise ConfigError(
                f"balanced_dp: gpu0_chunk={gpu0_chunk} and weights={weights} were both given. Give one of them."
            )
        self._gpu0_chunk = gpu0_chunk
        self.controller: BalanceController | None = None
        """Holds measurements and shares; None if nothing is measured."""
        if gpu0_chunk is not None:
            self.policy = FirstChunk(gpu0_chunk)
        elif weights is None or isinstance(weights, str):
            self.policy = self.controller = BalanceController(hysteresis)
        else:
            self.policy = Weighted(tuple(weights))
        self._pending: Measurement | None = None
        self._num_steps = 0
        self._told = WarningCache()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self.controller is not None:
            self.controller.begin(len(self.parallel_devices))
        if self._gpu0_chunk is not None and len(self.parallel_devices) == 1:
            rank_zero_info("balanced_dp: with one device gpu0_chunk has no effect: the device takes the whole batch.")
        super().setup(trainer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self.controller is not None:
            self.controller.save(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self.controller is not None:
            self.controller.load(checkpoint)
        return checkpoint

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        layout, controller = self.layout, self.controller
        if controller is None or not isinstance(layout, ReplicaLayout) or not layout.cut_by:
            return super().training_step(*args, **kwargs)
        if self._pending is None and (self._num_steps < FIRST_STEPS or self._num_steps % THEN_EVERY == 0):
            self._pending = layout.measure()
        self._num_steps += 1
        output = super().training_step(*args, **kwargs)
        if layout.has_met:
            self._pending = None
            self._told.info(
                "balanced_dp: the replicas wait for each other within a step (over_batch), so "
                "that their times can't be measured. Set strategy.weights to give them other shares than now."
            )
        if self._pending is not None and self._pending.is_ready():  # an accelerator may be one step late
            controller.observe(self._pending.sizes, self._pending.seconds())
            self._pending = None
        assert self.lightning_module is not None
        log_shares(self.lightning_module, controller.metrics)
        return output
