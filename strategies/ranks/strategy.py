"""The process side of strategies with ranks: pass what Lightning calls on to the parts that a strategy is made of."""

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, ClassVar

import pytorch_lightning as pl
import pytorch_lightning.strategies as pl_strategies
import torch
import torch.distributed as dist
from pytorch_lightning.plugins.layer_sync import TorchSyncBatchNorm
from pytorch_lightning.strategies.strategy import TBroadcast
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ..balance.ranks import RankBalance
from ..batch.evaluation_lists import EvaluationLists
from ..batch.layout import STEPS, GlobalView, Layout, drop_layout
from ..batch.meeting import SimulatedRanks, gathered, simulated_ranks
from ..batch.over_batch import verify_no_step_end
from ..batch.run_structures import RunStructures
from ..batch.structure import BatchDims, verify_batch_dims
from ..core.errors import ConfigError
from ..core.loop_contract import evaluation_step, load_states, run_backward, state_to_parameters, unwrapped
from ..core.module_checks import hooked, verify_shapes, verify_takes_batches, verify_takes_parts
from ..core.module_log import lightning_modules, module_log, restore_logs
from ..core.options import Positive, checked
from ..core.patching import replaced
from ..core.rng import seed_rank
from ..core.types import Batch
from ..data.loaders import BatchSizeIs, LoaderRole, RankLoaders, merge_predictions
from ..distributed.group import RankGroup
from ..distributed.objects import backend_for, broadcast_object, gather_objects, give_same_weights, reduce_tensor
from ..distributed.script_launcher import ScriptLauncher, StartMethod
from ..distributed.store import kubeflow, num_processes
from ..distributed.survivors import Regrouped
from ..distributed.wrapper import (
    SyncBatchNorm,
    needs_two_samples,
    verified_options,
    verify_static,
    verify_whole_batch,
)
from ..pipeline.layout import StageLayout
from ..pipeline.recompute import Recompute, RecomputeOption, verify_threads
from ..pipeline.stages import StageOptions
from ..replicas.layout import ReplicaLayout, ReplicaOptions
from ..sharding.optimizer_shards import OptimizerShards
from .gradient_sync import GradientSync
from .step import RankStep
from .whole_batches import WholeBatches


class RankStrategy(pl_strategies.DDPStrategy):
    """One process per group of devices. A named strategy derives from it, and says which parts it is made of.

    Args:
        batch_size_is, batch_dims, recompute, verify: as in `DDPStrategy`.
        timeout_s: seconds that a rank waits for the others before it fails.
        backend: `gloo`, `nccl`, ...; None chooses by the device. CPU tensors and objects go by gloo beside NCCL.
        sync_batchnorm: normalise by the statistics of the global batch, like `Trainer(sync_batchnorm=True)`.
        gather_lists_mb: MiB of tensors, of all ranks, that lists of the module may hold at the end of an evaluation,
            which every rank gets in its host's memory.
        start_method: how a plain script's processes start: `fork`, `spawn` or `forkserver`; None chooses by the device.
        ddp_options: keyword arguments of `torch.nn.parallel.DistributedDataParallel`.

    Raises:
        ConfigError: an option has a value that is not allowed.
    """

    strategy_name: str

    size_option: ClassVar[tuple[str, int]] = ("devices_per_process", 1)
    """Name and default of the option that is the number of devices of a process."""

    stage_options: StageOptions | None = None
    """How a process cuts its copy of the module across its devices; None if they hold replicas of it."""

    global_view: GlobalView = False

    devices_per_process = 1
    shard_optimizer = False

    @checked
    def __init__(
        self,
        batch_size_is: BatchSizeIs = "per_device",
        batch_dims: BatchDims | None = None,
        recompute: RecomputeOption = "never",
        timeout_s: Positive = 1800.0,
        backend: str | None = None,
        sync_batchnorm: bool = False,
        start_method: StartMethod | None = None,
        verify: bool = True,
        gather_lists_mb: Positive = 1024.0,
        **ddp_options: Any,
    ) -> None:
        self.group = RankGroup(timeout_s)
        super().__init__(
            cluster_environment=kubeflow(),
            process_group_backend=backend,
            timeout=self.group.timeout,
            **verified_options(self.strategy_name, ddp_options),
        )
        self._batch_dims = verify_batch_dims(batch_dims, self.strategy_name)
        self.structures = RunStructures(self._batch_dims)
        self._gather_lists_mb = gather_lists_mb
        self.batch_size_is: BatchSizeIs = batch_size_is
        self.recompute = Recompute(recompute, self.strategy_name)
        self.whole_batches = WholeBatches(self, verify)
        self.contract = RankStep(self)
        self.sync = GradientSync(self)
        self.balance = RankBalance(self.strategy_name)
        self._given_start_method: StartMethod | None = start_method
        self.syncs_batchnorm = sync_batchnorm
        self._manages_samples = True
        self._num_ranks: int | None = None
        self._optimizer_shards: dict[Optimizer, OptimizerShards] = {}

    def take_whole(self, sync: GradientSync) -> None:
        """Give all ranks whole batches: what divides these, or joins what ranks have of them, has nothing to do."""
        if self._layer_sync is not None and self.model is not None:
            self.model = self._layer_sync.revert(self.model)
        self._layer_sync, self.syncs_batchnorm = None, False
        self.sync, self.balance = sync, RankBalance(self.strategy_name)
        self.whole_batches.make_sync = None
        self.whole_batches.of_chunks.names |= STEPS

    @classmethod
    def count_processes(cls, num_devices: int, **options: Any) -> int:
        """Count the processes of a node."""
        return num_processes(num_devices, options.get(*cls.size_option))

    @property
    @override
    def num_processes(self) -> int:
        return num_processes(len(self.parallel_devices or ()), self.devices_per_process)

    @property
    def process_devices(self) -> list[torch.device]:
        """The devices of this process, the root device first."""
        assert self.parallel_devices is not None, "the trainer sets the devices"
        first = self.local_rank * self.devices_per_process
        return self.parallel_devices[first : first + self.devices_per_process]

    @property
    @override
    def root_device(self) -> torch.device:
        return self.process_devices[0]

    @override
    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        self._num_ranks = super().world_size
        drop_layout(self, unless_on=self.process_devices)

    @property
    @override
    def world_size(self) -> int:
        ranks = simulated_ranks() or self.seen_ranks
        return self.num_together if ranks is None else ranks.size

    @property
    def seen_ranks(self) -> SimulatedRanks | None:
        """The ranks that steps and hooks see, where they are not those that train together."""
        return self.sync.seen_ranks or self.whole_batches.seen_ranks

    @property
    def num_together(self) -> int:
        """Processes that train together, whatever a run sees of them."""
        return super().world_size if self._num_ranks is None else self._num_ranks  # mostly read from os.environ

    @property
    @override
    def global_rank(self) -> int:
        ranks = simulated_ranks()
        return super().global_rank if ranks is None else ranks.rank

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = ScriptLauncher(self, self.group.timeout_s, self._given_start_method)
        elif self._given_start_method is not None:
            raise ConfigError(
                f"{self.strategy_name}: start_method={self._given_start_method} was given, but train.py, torchrun or "
                "the cluster has started the processes. Leave it out; it is for plain scripts."
            )

    @override
    def _get_process_group_backend(self) -> str:
        return backend_for(self._process_group_backend, self.root_device)

    @override
    def setup_distributed(self) -> None:
        # as Lightning's, without its reset of the seed, which would change the order of samples from one device's
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        assert self.cluster_environment is not None
        self.group.meet(self.cluster_environment, self._process_group_backend, self.process_devices)

    def regroup(self, new: Regrouped) -> None:
        """Go on in the same process with the ranks that live; the weights are theirs already."""
        assert self.cluster_environment is not None
        assert self.parallel_devices is not None
        num = len(new.kept)
        self.balance.regroup(new.kept)
        self.sync.unwrap()
        os.environ.update(RANK=str(new.rank), LOCAL_RANK=str(new.rank))
        os.environ.update(WORLD_SIZE=str(num), LOCAL_WORLD_SIZE=str(num))
        self.parallel_devices = self.parallel_devices[:num]
        self.set_world_ranks()
        self.group.meet_again(self.cluster_environment, self._get_process_group_backend(), new.number)
        self.contract.agreement.end()
        self.contract.count_ranks(num)
        self.loaders.regroup(new.rank, num, self.balance.policy)
        self.sync.give_up()
        with replaced(self, "_ddp_kwargs", {**self._ddp_kwargs, "init_sync": False}):
            self.sync.wrap(super().configure_ddp)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        give_same_weights(self.module, self.root_device)
        self.sync.begin_streams()
        self.begin_loaders()  # a module's `setup` may ask for its loaders, as `estimated_stepping_batches` does

    def begin_loaders(self) -> None:
        """Forget the loaders of an earlier run, or of other ranks."""
        trainer = self.trainer
        self.balance.begin(self.world_size)
        connector = trainer._accelerator_connector
        if self.group.trainer is not trainer:
            self._manages_samples = connector.use_distributed_sampler
            connector.use_distributed_sampler = False  # Lightning's sampler pads; `process_dataloader` cuts instead
        lists = EvaluationLists(
            self.strategy_name, self._batch_dims, gather_objects if self.world_size > 1 else None, self._gather_lists_mb
        )
        self.structures = RunStructures(self._batch_dims, lists)
        vars(self).pop("loaders", None)
        self.group.begin(trainer)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return tensor if self.world_size == 1 else reduce_tensor(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor from all ranks.

        Args:
            tensor: of shape (n, ...), where n may differ between ranks; a rank that has joined without samples has 0.
            group: the process group; None for that of all ranks.
            sync_grads: whether gradients go back to the ranks' tensors, so that a loss of own samples against all rows,
                or of all rows, has those of the whole batch.

        Returns:
            A tensor of shape (ranks, n, ...) or, where n differs, of shape (1, sum of all n, ...): `flatten(0, 1)` has
            all rows, by rank, in both.

        Raises:
            ConfigError: the shapes differ otherwise, or some ranks, without samples, don't run the step of evaluation.
        """
        if (ranks := simulated_ranks() or self.seen_ranks) is not None:
            return ranks.gather(tensor, sync_grads)
        if not dist.is_initialized():
            return tensor
        return gathered(tensor, self.strategy_name, partial(self._gathered, group=group, sync_grads=sync_grads))

    def _gathered(self, tensor: Tensor, group: Any | None, sync_grads: bool) -> Tensor:
        found = self.contract.rows.of_all(tensor, group, sync_grads)
        return super().all_gather(tensor, group, sync_grads) if found is None else found

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        return broadcast_object(obj, src) if dist.is_initialized() else obj

    @override
    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        self.group.wait(name or "an unnamed barrier")

    @property
    def module(self) -> pl.LightningModule:
        """The module of the run."""
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def trainer(self) -> pl.Trainer:
        """The trainer of the run."""
        return self.module.trainer

    @cached_property
    def layout(self) -> Layout:
        """How this process uses its devices."""
        devices, name = self.process_devices, self.strategy_name
        if self.stage_options is not None:
            return StageLayout(devices, self.stage_options, name, self.reduce)
        if len(devices) == 1:
            return Layout(devices)
        return ReplicaLayout(devices, ReplicaOptions(name, "strategy.devices_per_process=1", one_by_one=True))

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self.sync.seen_ranks is None:
            self.whole_batches.of_chunks.names.clear()
        else:
            self._layer_sync = None
        if isinstance(self._layer_sync, TorchSyncBatchNorm) or (self.syncs_batchnorm and self._layer_sync is None):
            self.syncs_batchnorm, self._layer_sync = True, SyncBatchNorm()  # torch's own refuses the CPU
        name, cut = self.strategy_name, self.layout.cut_by
        if self._ddp_kwargs.get("static_graph"):
            verify_static(trainer.lightning_module, cut, name)
        if self.recompute.is_on:
            verify_threads(self.process_devices, None if self.stage_options is None else False, name)
        if cut and trainer.state.fn == TrainerFn.FITTING:
            by = f"{name}: {cut}", f"{cut.partition('=')[0]}=1"
            verify_whole_batch(trainer.lightning_module, self.syncs_batchnorm, *by)
        verify_takes_batches(trainer, self.strategy_name, "strategy=single_device")
        self.layout.whole = self.whole_batches.of_chunks
        verify_no_step_end(trainer.lightning_module)
        self.layout.verify(trainer)
        self.recompute.begin(trainer, "auto" if self.stage_options is None else self.stage_options.partition)
        verify_takes_parts(trainer.lightning_module, self.strategy_name)
        verify_shapes(trainer.lightning_module)
        self.contract.begin_run(trainer)
        if self.sync.evaluates_together and trainer.state.fn == TrainerFn.FITTING:
            self.precision_plugin.convert_module(self.module)  # as it trains; Lightning does so once more
            self.whole_batches.before_wrapping()
        self._place(trainer)
        for optimizer in self.optimizers:
            state_to_parameters(optimizer)
        for module in lightning_modules(self.module):
            module_log(module)
        self.layout.begin(trainer, self.structures)

    def _place(self, trainer: pl.Trainer) -> None:
        """Put the module on this process's devices, and make the optimizers."""
        super().setup(trainer)

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None]:
        with super().tensor_init_context(empty_init), self.layout.creating():
            yield

    @override
    def model_to_device(self) -> None:
        self.layout.place(self.module)

    @override
    def determine_ddp_device_ids(self) -> list[int] | None:
        return None  # inputs are where they must be; with ids Lightning uses torch.cuda, whatever the device

    @override
    def configure_ddp(self) -> None:
        self.whole_batches.before_wrapping()
        self.sync.wrap(super().configure_ddp)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if self.num_together > 1:
            self.contract.agreement.begin(self.optimizers)
        if self.shard_optimizer and self.num_together > 1:
            rank, num, gather = self.global_rank, self.num_together, partial(gather_objects, only_first=True)
            name = self.strategy_name
            self._optimizer_shards = {own: OptimizerShards(own, rank, num, gather, name) for own in self.optimizers}

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.sync.fail(exception)
        self.group.fail(exception)

    @override
    def teardown(self) -> None:
        with self.sync.ending():
            if "layout" in vars(self):
                self.layout.close()
            if self.lightning_module is not None:
                restore_logs(self.lightning_module)
            self.contract.end()
            self.group.end()
            super().teardown()
            self.recompute.end()

    @cached_property
    def loaders(self) -> RankLoaders:
        """Makes this rank's loaders; created on first use, which may be in `configure_optimizers`."""
        return self._make_loaders()

    def _make_loaders(self) -> RankLoaders:
        return RankLoaders(
            self.strategy_name, self._read_as, self.world_size, self.batch_size_is, self.broadcast,
            self.group.sum_beside, self.balance.policy, 1 + needs_two_samples(self.module),
            self.structures.of_stream, self.sync.evaluates_together, is_whole=self.whole_batches.is_whole,
            joined=1 if self.seen_ranks is None else self.num_together,
        )  # fmt: skip

    @property
    def _read_as(self) -> int:
        """The rank whose batches and random numbers are this one's."""
        return 0 if self.world_size == 1 else self.global_rank

    @override
    def process_dataloader(self, dataloader: object) -> object:
        role: LoaderRole = "train" if self.trainer.training else "predict" if self.trainer.predicting else "evaluate"
        loaders = self.loaders if self.whole_batches.seen_ranks is None else self._make_loaders()
        return loaders.process(dataloader, role, self._manages_samples)

    @override
    def batch_to_device(self, batch: Batch, device: torch.device | None = None, dataloader_idx: int = 0) -> Batch:
        self.contract.begin_batch(dataloader_idx)
        return super().batch_to_device(batch, device or self.layout.meeting_device, dataloader_idx)

    @override
    def on_train_start(self) -> None:
        self.contract.begin_pass()
        self.contract.shares.knows_parts = False  # the loaders may be other ones
        self.layout.weights_changed()
        if not self.trainer.fit_loop.restarting:  # a resumed run restores its saved streams
            seed_rank(self._read_as, self.process_devices)
        self.sync.begin_streams()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.sync.begin_batch()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self.contract.train(*args, **kwargs)

    backward = run_backward

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        with self.sync.accumulating(hooked("on_after_backward", self.trainer)):
            yield

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        self.layout.verify_optimizer_step()
        with self.sync.updating():
            result = super().optimizer_step(optimizer, self.contract.agreed(optimizer, closure), *args, **kwargs)
        self.contract.finish_step()
        return result

    validation_step, test_step = evaluation_step("val"), evaluation_step("test")
    predict_step = evaluation_step("predict")

    @override
    def on_validation_start(self) -> None:
        self.contract.begin_pass()
        self.sync.begin_streams()
        self.structures.lists.begin(self.module)
        # evaluation bypasses the wrapper, which broadcasts rank 0's buffers in forward, because ranks may have unequal
        # numbers of batches
        self.sync.sync_buffers()
        self.layout.weights_changed()
        self.whole_batches.begin_evaluation()

    on_test_start = on_validation_start

    @override
    def on_predict_end(self) -> None:
        if self.trainer.predict_loop.return_predictions and self.world_size > 1:
            merge_predictions(self.trainer.predict_loop, self.global_rank, partial(gather_objects, only_first=True))

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        shards = self._optimizer_shards.get(unwrapped(optimizer))
        return super().optimizer_state(optimizer) if shards is None else shards.whole_state()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self.balance.controller is not None:
            self.balance.controller.save(checkpoint)
        super().save_checkpoint(self.sync.whole_tree(checkpoint), filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self.balance.controller is not None:
            self.balance.controller.load(checkpoint)
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        load_states(self.optimizers, checkpoint)
        for shards in self._optimizer_shards.values():
            shards.take_state()
