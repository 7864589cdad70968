"""Train with a copy of the module per device in one process, cutting every batch among them."""

from collections.abc import Sequence

import pytorch_lightning as pl
from typing_extensions import override

from .batch.layout import Layout, SingleLayout
from .batch.losses import LossReduction
from .batch.policies import Even, Policy
from .batch.structure import BatchDims
from .core.types import Device
from .one_process import OneProcessStrategy
from .replicas.layout import ReplicaLayout, ReplicaOptions
from .replicas.submodule import find_submodule


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

    def __init__(
        self,
        devices: Sequence[Device] | None = None,
        loss_reduction: LossReduction = "mean",
        submodule: str | None = None,
        copy_frozen: bool = False,
        threads: bool | None = None,
        batch_dims: BatchDims | None = None,
    ) -> None:
        super().__init__(devices, batch_dims)
        self.replica_options = ReplicaOptions(
            self.strategy_name, "strategy=ddp", loss_reduction, submodule, copy_frozen, threads
        )
        self.policy: Policy = Even()

    @override
    def new_layout(self) -> Layout:
        if len(self.process_devices) == 1:
            return SingleLayout(self.process_devices)
        return ReplicaLayout(self.process_devices, self.replica_options, self.policy)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self.policy.verify(len(self.process_devices), self.strategy_name)
        if self.replica_options.submodule is not None:
            find_submodule(trainer.lightning_module, self.replica_options.submodule, self.strategy_name)
        self._layout = None  # the policy may be another one than in an earlier run
        super().setup(trainer)
