"""Train with one process per device, averaging gradients by torch's DistributedDataParallel, weighted by samples."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, ClassVar

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import RunningStage, TrainerFn
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from .balance.controller import BalanceController
from .balance.ranks import RankBalance
from .batch.layout import Layout, SingleLayout, drop_layout, evaluate_in_layout, evaluation_step
from .batch.loss_weight import loss_weight, weighs_in_loop
from .batch.policies import Even, Policy
from .batch.run_structures import RunStructures
from .batch.structure import BatchDims, verify_batch_dims
from .core.errors import ConfigError
from .core.loop_contract import StepContract, has_context, run_backward
from .core.module_checks import verify_takes_batches, verify_takes_parts
from .core.module_log import lightning_modules, module_log, restore_logs
from .core.optimizer_states import load_states, state_to_parameters
from .core.options import Count, checked
from .core.private import of_lightning, of_torch
from .core.rng import seed_rank
from .core.types import Batch
from .data.loaders import BatchSizeIs, LoaderRole, RankLoaders, positions
from .data.loss_check import verify_mean
from .data.predictions import merge_predictions
from .data.shares import RankShares
from .distributed.base import MultiProcessStrategy
from .distributed.device_blocks import num_processes, own_devices, verify_one_type
from .distributed.metrics.run import RunMetrics
from .distributed.objects import gather_on_first
from .distributed.options import verify_backend, verify_static
from .distributed.sync_batchnorm import needs_two_samples, verify_whole_batch
from .distributed.wrapper import StepReduction, forward_through, reduce_finished, verify_reduced
from .distributed.zero_weight_step import recompute_weights, trial_step, zero_weight_step
from .pipeline.layout import StageLayout
from .pipeline.options import StageOptions
from .pipeline.recompute import Recompute, RecomputeOption, verify_threads
from .replicas.layout import ReplicaLayout, ReplicaOptions
from .sharding.optimizer_shards import CutStates, OptimizerShards


class DDPStrategy(MultiProcessStrategy):
    """Train with one process per device, each on its own part of every global batch.

    Training equals one device's on the same global batch: no sample is dropped or read twice, and each rank's gradient
    is weighted by its samples (or by the `loss_weight` that the module returns). Evaluation sees every sample once.

    Under `train.py`, torchrun, SLURM or Kubeflow the processes exist already. In a plain script the trainer starts
    them, by fork on CPU and by spawn on accelerators (or `start_method`), so that it does not run once per device.

    Args:
        batch_size_is: meaning of the loader's batch. `per_device`: the batch of one rank; the global batch is that
            times the number of ranks. `global`: the global batch, divided among the ranks.
        devices_per_process: number of devices per process; its batch is cut among replicas on them.
        shard_optimizer: cut the optimizers' state over the ranks (ZeRO, stage 1): each updates some of the parameters.
        recompute: parts of the module whose activations are computed once more in the backward pass: `never`,
            `always`, `except_last`, or names of submodules.
        verify_loss: refuse a loss that is not the mean over samples, where the first batch has tensors of other numbers
            of rows than samples (graphs). False weights it by samples nevertheless.
        **options: options of `MultiProcessStrategy` (`timeout_s`, `start_method`, ...) and of
            `torch.nn.parallel.DistributedDataParallel`: `find_unused_parameters`, `static_graph`,
            `gradient_as_bucket_view`, `bucket_cap_mb`, ...

    Raises:
        ConfigError: an option has an invalid value.
    """

    strategy_name = "ddp"

    stage_options: StageOptions | None = None
    """How a process cuts its copy of the module across its devices; None if they hold replicas of it."""

    size_option: ClassVar[tuple[str, int]] = ("devices_per_process", 1)
    """Name and default of the option that is the number of devices of a process."""

    evaluates_in_step: ClassVar[bool] = False
    """Whether a rank without samples runs evaluation steps, too, because the others' need it."""

    balance: RankBalance | None = None
    """What divides global batches in shares that are not even."""

    @checked
    def __init__(
        self,
        batch_size_is: BatchSizeIs = "per_device",
        devices_per_process: Count = 1,
        batch_dims: BatchDims | None = None,
        shard_optimizer: bool = False,
        recompute: RecomputeOption = "never",
        verify_loss: bool = True,
        **options: Any,
    ) -> None:
        if devices_per_process > 1 and self.stage_options is None and options.get("static_graph"):
            raise ConfigError(
                f"ddp: static_graph=true can't be recorded with devices_per_process={devices_per_process}, whose "
                "replicas have a backward pass of their own. Set static_graph=false, or devices_per_process=1."
            )
        verify_backend(options.get("backend"))
        super().__init__(**options)
        self._batch_dims = verify_batch_dims(batch_dims, self.strategy_name)
        self.structures = RunStructures(self._batch_dims)
        self.batch_size_is: BatchSizeIs = batch_size_is
        self.devices_per_process = devices_per_process
        self.shard_optimizer = shard_optimizer
        self.verify_loss = verify_loss
        self.recompute = Recompute(recompute, self.strategy_name)
        self._cut_states = CutStates()
        self._loaders: RankLoaders | None = None
        self._manages_samples = True
        self.shares = RankShares(1, self.strategy_name)
        """This rank's share of the current batch."""
        self._weighs_in_loop = False
        self._reduction: StepReduction | None = None
        self._without_gradient: list[nn.Parameter] = []
        self._evaluation_loop: Any = None
        self.metrics: RunMetrics | None = None
        """Computes the values of metrics over all ranks; None outside a run."""

    @classmethod
    def count_processes(cls, num_devices: int, **options: Any) -> int:
        """Count the processes of a node: its devices by those of a process.

        Raises:
            ConfigError: the devices don't divide into processes.
        """
        return num_processes(num_devices, options.get(*cls.size_option))

    @property
    @override
    def num_processes(self) -> int:
        return num_processes(len(self.parallel_devices or ()), self.devices_per_process)

    @property
    @override
    def process_devices(self) -> list[torch.device]:
        """The devices of this process, the root device first."""
        assert self.parallel_devices is not None, "the trainer sets the devices"
        return own_devices(self.parallel_devices, self.local_rank, self.devices_per_process)

    @property
    @override
    def root_device(self) -> torch.device:
        return self.process_devices[0]

    @override
    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        drop_layout(self, unless_on=self.process_devices)

    @cached_property
    def layout(self) -> Layout:
        """How this process uses its devices."""
        devices, name = self.process_devices, self.strategy_name
        if self.stage_options is not None:
            options = self.recompute.stage_options(self.stage_options, devices)
            return StageLayout(devices, options, name, self.reduce, self._new_reduction)
        if len(devices) > 1:
            return ReplicaLayout(devices, ReplicaOptions(name, "strategy.devices_per_process=1"))
        return SingleLayout(devices)

    @property
    def policy(self) -> Policy:
        """The policy that divides a global batch among the ranks."""
        return Even() if self.balance is None else self.balance.policy

    @property
    def controller(self) -> BalanceController | None:
        """What measures and decides the shares of the ranks; None if nothing is measured."""
        return None if self.balance is None else self.balance.kept.controller

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._verify_options(trainer)
        verify_takes_batches(trainer, self.strategy_name, "strategy=single_device")
        self.layout.verify(trainer)
        self.recompute.begin(trainer, "auto" if self.stage_options is None else self.stage_options.partition)
        verify_takes_parts(trainer.lightning_module, self.strategy_name)
        if self.balance is not None:
            self.balance.begin(self.world_size)
        connector = of_lightning.accelerator_connector(trainer)
        if self._trainer is not trainer:
            self._manages_samples = connector.use_distributed_sampler
            connector.use_distributed_sampler = False  # Lightning's sampler pads; `process_dataloader` cuts instead
        self.structures = RunStructures(self._batch_dims)
        self._loaders = None
        super().setup(trainer)
        for optimizer in self.optimizers:
            state_to_parameters(optimizer)
        self.shares = RankShares(self.world_size, self.strategy_name)
        self.metrics = RunMetrics(whole=not self.layout.cut_by)
        for module in lightning_modules(self.module):
            module_log(module)
        self.layout.begin(trainer, self.structures)

    def _verify_options(self, trainer: pl.Trainer) -> None:
        """Refuse what torch's DDP can't do with the devices of a process."""
        module, name, cut = trainer.lightning_module, self.strategy_name, self.layout.cut_by
        if self.stage_options is not None:
            verify_one_type(self.process_devices, name)
        if self._ddp_kwargs.get("static_graph"):
            verify_static(module, cut, name)
        if self.recompute.is_on:
            verify_threads(self.process_devices, None if self.stage_options is None else False, name)
        if cut and trainer.state.fn == TrainerFn.FITTING:
            verify_whole_batch(module, self._syncs_batchnorm, f"{name}: {cut}", f"{cut.partition('=')[0]}=1")

    @override
    def model_to_device(self) -> None:
        self.layout.place(self.module)

    @override
    def determine_ddp_device_ids(self) -> list[int] | None:
        # with ids DDP would move the module's inputs to one device
        return super().determine_ddp_device_ids() if len(self.process_devices) == 1 else None

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None]:
        with super().tensor_init_context(empty_init), self.layout.creating():
            yield

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if self.shard_optimizer and self.world_size > 1:
            rank, num = self.global_rank, self.world_size
            part = partial(OptimizerShards, rank=rank, num_ranks=num, gather=gather_on_first)
            self._cut_states.cut(self.optimizers, self.strategy_name, part)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        whole = self._cut_states.state(optimizer)
        return super().optimizer_state(optimizer) if whole is None else whole

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        load_states(self.optimizers, checkpoint)
        self._cut_states.take()

    @property
    def loaders(self) -> RankLoaders:
        """Makes this rank's loaders; created on first use, which may be in `configure_optimizers`."""
        if self._loaders is None:
            sums, smallest = self._sums, 1 + needs_two_samples(self.module)
            assert sums is not None
            self._loaders = RankLoaders(
                self.global_rank,
                self.world_size,
                self.batch_size_is,
                self.broadcast,
                sums,
                self.policy,
                smallest,
                structure_of=self.structures.of_stream,
                in_step=self.evaluates_in_step,
            )
        return self._loaders

    @override
    def process_dataloader(self, dataloader: object) -> object:
        role: LoaderRole = "train" if self.trainer.training else "predict" if self.trainer.predicting else "evaluate"
        return self.loaders.process(dataloader, role, self._manages_samples)

    def _begin_pass(self, evaluation: Any) -> None:
        """Begin a pass over loaders, refusing an evaluation that ranks would not read side by side."""
        assert self.metrics is not None
        self.metrics.begin_pass(self.module)
        self._evaluation_loop = evaluation
        self.shares.verify_evaluation(getattr(evaluation, of_lightning.COMBINED_LOADER, None))

    @override
    def on_train_start(self) -> None:
        self._begin_pass(self.trainer.fit_loop.epoch_loop.val_loop)
        self.shares.begin_training()
        self.layout.verify_loaders()
        self.layout.weights_changed()
        self.loaders.tell(of_lightning.combined_loader(self.trainer.fit_loop))
        if not self.trainer.fit_loop.restarting:  # a resumed run restores its saved streams
            seed_rank(self.global_rank, self.process_devices)

    @property
    def meeting_device(self) -> torch.device:
        """The device that batches are moved to."""
        return self.layout.meeting_device

    @override
    def batch_to_device(self, batch: Batch, device: torch.device | None = None, dataloader_idx: int = 0) -> Batch:
        self.begin_batch(dataloader_idx)
        return super().batch_to_device(batch, device or self.meeting_device, dataloader_idx)

    def begin_batch(self, dataloader_idx: int) -> None:
        """Read this rank's share of the global batch from its next batch, and tell metrics which batch that is."""
        trainer, shares = self.trainer, self.shares
        stage = trainer.state.stage  # by identity: Lightning's properties compare the names of stages
        if stage is None or stage is RunningStage.PREDICTING:
            joins = stage is not None and self.evaluates_in_step
            if joins or shares.current is not None:
                combined = of_lightning.combined_loader(trainer.predict_loop) if joins else None
                shares.begin_batch(combined, dataloader_idx)
            return
        trains, metrics = stage is RunningStage.TRAINING, self.metrics
        combined: Any = of_lightning.combined_loader(trainer.fit_loop if trains else self._evaluation_loop)
        shares.begin_batch(combined, dataloader_idx, trains)
        assert metrics is not None
        metrics.steps.begin_batch(shares.is_part, shares.counts)
        if not trains and not shares.counts:  # the rank only joins in what the steps of others need
            return
        metrics.has_evaluated = not trains
        if not metrics.sync.watched:
            return
        num_trained: Any = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if trains:
            metrics.begin_training_batch(num_trained + 1)  # Lightning counts it after this
        else:
            places = positions(combined.flattened[dataloader_idx])
            metrics.begin_evaluated_batch(num_trained, dataloader_idx, places, self.world_size)

    def runs_alone(self, step: str) -> bool:
        """Whether a step of evaluation is the module's own: nothing happens around it on the only device."""
        return step != "training_step" and isinstance(self.layout, SingleLayout) and not self.evaluates_in_step

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        counts, module, trainer = self.shares.counts, self.module, self.trainer
        if self.balance is not None:
            self.balance.begin_step(module, self.root_device, self.loaders.change_policy)
        if not module.automatic_optimization:
            self.shares.verify_parts(trainer.fit_loop, args[0])  # the step itself steps the optimizer
        if counts and self.states.has_ended and self.agreement.has_ended:
            output = self._own_step(*args, **kwargs)
        else:
            with self._watching(module), nullcontext() if counts else zero_weight_step(module):
                output = self._own_step(*args, **kwargs)
        module_weighs = isinstance(output, dict) and output.get("loss_weight") is not None
        if not counts and output is not None:  # None in manual optimization
            output = {**(output if isinstance(output, dict) else {"loss": output}), "loss_weight": 0.0}
        if module_weighs:
            own = loss_weight(output, args[0])
            self.shares.weigh(own, self.total_loss_weight(own), self.layout.losses)
        self._weighs_in_loop = weighs_in_loop(trainer)
        if not module_weighs:
            self.shares.verify_parts(trainer.fit_loop, args[0], partial(self._loss_is_mean, args[1:], kwargs))
        return output

    @contextmanager
    def _watching(self, module: pl.LightningModule) -> Generator[None]:
        """Watch one of the first steps for what ranks must have in common; every rank must call it."""
        self.agreement.begin_step()
        with self.states.watching(module):
            yield
        if not (self.agreement.has_ended or module.automatic_optimization):
            self.agreement.verify_weights(module)

    def _loss_is_mean(self, rest: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
        """Whether the module's loss is known to be the mean over samples; it is refused if it is known not to be.

        Args:
            rest: arguments of `training_step` after the batch.
        """
        module, trainer = self.module, self.trainer
        loaders = of_lightning.flattened(of_lightning.combined_loader(trainer.fit_loop))
        if not (self.verify_loss and module.automatic_optimization and self.runs_alone("") and len(loaders) == 1):
            return not self.verify_loss

        def loss_of(batch: Batch, seed: int) -> float:
            batch = of_lightning.on_before_batch_transfer(module)(trainer.precision_plugin.convert_input(batch), 0)
            batch = super(DDPStrategy, self).batch_to_device(batch, self.meeting_device)
            with trial_step(module), torch.random.fork_rng():
                torch.manual_seed(seed)
                output: Any = module.training_step(batch, *rest, **options)
            return float(output["loss"] if isinstance(output, dict) else output)

        return verify_mean(loss_of, loaders[0], self.strategy_name)

    def _own_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run this rank's own step, through DDP's wrapper if that is to reduce gradients in the backward pass."""
        if has_context(self.precision_plugin, "train_step_context"):
            with self.precision_plugin.train_step_context():
                return self._wrapped_step(*args, **kwargs)
        return self._wrapped_step(*args, **kwargs)

    def _wrapped_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._reduction = None
        wrapper = of_lightning.model(self)
        if isinstance(wrapper, DistributedDataParallel) and not self.layout.finishes_later:
            return forward_through(wrapper, self._step_in_layout, *args, is_reduced=self._is_reduced, **kwargs)
        self._sync_buffers()
        return self._step_in_layout(*args, **kwargs)

    def _step_in_layout(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self.balance is None:
            return self.layout.step("training_step", *args, **kwargs)
        with self.balance.forward():
            return self.layout.step("training_step", *args, **kwargs)

    def _new_reduction(self) -> StepReduction | None:
        """What reduces this step's gradients before its loss is known; None if they can't be scaled afterwards."""
        model, is_plain = self.model, self._hook is None and self._ddp_kwargs.get("mixed_precision") is None
        # what measures ranks would measure their wait for each other
        if isinstance(model, DistributedDataParallel) and is_plain and self.controller is None:
            self._reduction = StepReduction(model, self.shares.weight, self.shares.per_weight)
        return self._reduction

    def _is_reduced(self) -> bool:
        """Whether the gradients of the step were reduced within it."""
        return self._reduction is not None and self._reduction.is_done

    def _sync_buffers(self) -> None:
        if isinstance(self.model, DistributedDataParallel) and self.model.will_sync_module_buffers():
            of_torch.sync_buffers(self.model)()

    backward = run_backward
    stands_in = StepContract.stands_in
    whole_gradients, restore_gradients = StepContract.whole_gradients, StepContract.restore_gradients

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Weight this rank's loss, so that the mean of all ranks' gradients is the gradient of the global batch."""
        if self.module.automatic_optimization:
            self.verify_trained()
        elif self._trained is not None:
            # frozen since the forward (`toggle_optimizer`): the wrapper will give them zeros
            self._without_gradient = [p for p in self._trained.frozen() if p.grad is None]
        if self.balance is not None:
            self.balance.begin_backward()
        return self.shares.scaled(loss, self._weighs_in_loop, self._is_reduced())

    def _separate_from_buckets(self) -> None:
        """Give parameters tensors of their own for gradients that are views of the wrapper's buckets.

        The wrapper keeps its views: what a hook writes by `p.grad.data = ...` would take them out of the buckets.
        """
        assert self._trained is not None
        for _, parameter in self._trained.reduced:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach()

    def finish_backward(self) -> None:
        """Complete the gradients of this process, and average them over the ranks if the wrapper has not."""
        wrapper = of_lightning.model(self)
        is_wrapped = isinstance(wrapper, DistributedDataParallel)
        if self.layout.finishes_later:
            self.layout.finish_backward()
            if is_wrapped:
                reduce_finished(wrapper)
        while self._without_gradient:  # hooks would see the zeros, and optimizers would step with them
            self._without_gradient.pop().grad = None
        if self.balance is not None:
            share = self.shares.current
            self.balance.finish_backward(0.0 if share is None else share.num, self.loaders.exchange)
        if is_wrapped:
            verify_reduced(wrapper)
            if wrapper.gradient_as_bucket_view:  # last: the wrapper has new buckets after its first backward
                self._separate_from_buckets()

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        self.layout.verify_optimizer_step()
        if self.agrees_on_loss(optimizer):
            closure = partial(self._agreed_loss, closure)
        result = super().optimizer_step(optimizer, closure, *args, **kwargs)
        self.finish_step()
        return result

    def agrees_on_loss(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer decides by the loss, which must then be the global batch's, or ranks would diverge."""
        return isinstance(optimizer, LBFGS)

    def _agreed_loss(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        return self.global_loss(loss) if loss is not None else None

    def global_loss(self, loss: Tensor) -> Tensor:
        """The loss of the global batch of the current step, of this rank's loss; called on every rank."""
        return self.reduce(self.shares.scaled(loss.detach().clone()), reduce_op="mean")

    def finish_step(self) -> None:
        """Have the layout learn that the optimizer has stepped."""
        if self.layout.finish_step():
            self.wrap_again()

    def reduce_logged(self, value: Tensor, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce logged values; a mean over ranks weights each by its samples in the current batch."""
        if self.shares.current is not None and reduce_op in ("mean", "avg"):
            value = value * self.shares.weight
        return self.reduce(value, group, reduce_op)

    _evaluate = evaluate_in_layout
    validation_step, test_step = evaluation_step("val"), evaluation_step("test")
    predict_step = evaluation_step("predict")

    @override
    def on_test_start(self) -> None:
        self._begin_pass(of_lightning.evaluation_loop(self.trainer))

    @override
    def on_validation_start(self) -> None:
        self._begin_pass(of_lightning.evaluation_loop(self.trainer))
        # evaluation bypasses the wrapper, which broadcasts rank 0's buffers in forward, because ranks may have unequal
        # numbers of batches
        self._sync_buffers()
        self.layout.weights_changed()

    @override
    def on_validation_end(self) -> None:
        assert self.metrics is not None
        if not self.metrics.has_evaluated:
            recompute_weights(self.module)

    @override
    def on_predict_end(self) -> None:
        if self.trainer.predict_loop.return_predictions:
            merge_predictions(self.trainer.predict_loop, self.global_rank, gather_on_first)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self.balance is not None:
            self.balance.kept.save(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self.balance is not None:
            self.balance.kept.load(checkpoint)
        return checkpoint

    @override
    def teardown(self) -> None:
        if "layout" in vars(self):
            self.layout.close()
        if self.lightning_module is not None:
            restore_logs(self.lightning_module)
        if self.metrics is not None:
            self.metrics.end()
            self.metrics = None
        super().teardown()
        self.recompute.end()
