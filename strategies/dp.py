"""Train with a copy of the module per device in one process, cutting every batch among them."""

from collections.abc import Sequence

import pytorch_lightning as pl
from typing_extensions import override

from .batch.layout import Layout, OrWhole, SingleLayout, drop_layout
from .batch.one_process import OneProcessStrategy
from .batch.policies import Even, Policy
from .batch.structure import BatchDims
from .core.errors import verify_submodules
from .core.options import checked
from .core.types import Device
from .pipeline.recompute import Recompute, RecomputeOption, verify_threads
from .replicas.layout import ReplicaLayout, ReplicaOptions


class DataParallelStrategy(OneProcessStrategy):
    """Train with a replica of the module per device, in one process.

    `training_step` runs on every replica with its chunk of the batch; the losses are combined to the mean of the whole
    batch, and the gradients summed on the root device, which alone has an optimizer. Training equals
    `SingleDeviceStrategy`, except for BatchNorm statistics and random streams (docs/data_parallel.md).

    A loss over the batch is computed on the root device, by `evener.over_batch` or `training_step_end(outputs)`. In
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

    @override
    def new_layout(self) -> Layout:
        devices = self.process_devices
        return SingleLayout(devices) if len(devices) == 1 else ReplicaLayout(devices, self.replica_options, self.policy)

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
