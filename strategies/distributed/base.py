"""Coordinate the ranks of any DDP strategy: start, synchronize, sum, stop at one step, name a rank that fails."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar, cast

import pytorch_lightning as pl
import pytorch_lightning.strategies as pl_strategies
import torch
import torch.distributed as dist
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.distributed import PrefixStore, Work
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from ..core.devices import is_accelerator, precise_dtype, scalar
from ..core.errors import ConfigError
from ..core.module_checks import hooked
from ..core.options import Positive, checked
from ..core.private import of_lightning, put
from ._coordinator import RankCoordinator
from ._same_weights import Agreement, StateWatch, give_same_weights
from ._stop import StopAgreement as StopAgreement
from .environment import kubeflow
from .objects import backend_for, gather_objects
from .options import Compression, compression_hook, name_unused_parameters, reducer_options, verified_options
from .process_exit import leave_group_at_exit, prepare_forked
from .scripts.launcher import ScriptLauncher, StartMethod
from .sync_batchnorm import SyncBatchNorm
from .wrapper import ReducedParameters, unwrap


class SideGroup:
    """Starts sums of small CPU tensors over all ranks, in place, that run beside the gradients.

    Args:
        timeout: limit for each sum.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._group: dist.ProcessGroup | None = cast(
            "dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout)
        )

    def __call__(self, values: Tensor) -> Work:
        """Start summing a tensor."""
        assert self._group is not None, "the run has ended"
        return cast(Work, dist.all_reduce(values, group=self._group, async_op=True))

    def end(self) -> None:
        """End the group and its threads, even if this object is still referenced (by a loader, for example)."""
        dist.destroy_process_group(self._group)
        self._group = None


class MultiProcessStrategy(pl_strategies.DDPStrategy):
    """Lightning's DDP where every wait is bounded by `timeout_s`, and sums are exact.

    Args:
        timeout_s: seconds that a rank waits for the others before it fails.
        backend: `gloo`, `nccl`, ...; None chooses by the device. CPU tensors and objects go by gloo beside NCCL.
        compression: compression of gradients between ranks: `fp16`, `bf16`, `powersgd`, or None.
        sync_batchnorm: normalise by the statistics of the global batch, like `Trainer(sync_batchnorm=True)`.
        start_method: how a plain script's processes start: `fork`, `spawn` or `forkserver`; None chooses by the device.
        ddp_options: keyword arguments of `torch.nn.parallel.DistributedDataParallel`.

    Raises:
        ConfigError: an option has a value that is not allowed.
    """

    strategy_name: str

    further_options: ClassVar[dict[str, Any]] = reducer_options()
    """The options that `**options` of a constructor may hold, with their annotations."""

    @checked
    def __init__(
        self,
        timeout_s: Positive = 1800.0,
        backend: str | None = None,
        compression: Compression | None = None,
        sync_batchnorm: bool = False,
        start_method: StartMethod | None = None,
        **ddp_options: Any,
    ) -> None:
        super().__init__(
            cluster_environment=kubeflow(),
            process_group_backend=backend,
            timeout=timedelta(seconds=timeout_s),
            **verified_options(self.strategy_name, ddp_options),
        )
        self.timeout_s = timeout_s
        self.coordinator: RankCoordinator | None = None
        self.stop_signal: int | None = None
        self.at_teardown: Callable[[], None] | None = None
        self._given_start_method: StartMethod | None = start_method
        self._hook = compression_hook(compression)
        self._sums: SideGroup | None = None
        self._syncs_batchnorm = sync_batchnorm
        self._trainer: pl.Trainer | None = None
        self._trained: ReducedParameters | None = None
        self._recorded: nn.Module | None = None
        self._failed = False
        self.states = StateWatch(self.strategy_name)
        self.agreement = Agreement(self.strategy_name)
        self._num_ranks: int | None = None

    @property
    def module(self) -> pl.LightningModule:
        """The module of the run."""
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def trainer(self) -> pl.Trainer:
        """The trainer of the run."""
        assert self._trainer is not None
        return self._trainer

    @property
    def _layer_sync(self) -> SyncBatchNorm | None:
        """The layer plugin that Lightning sets for `sync_batchnorm=True`; torch's own would refuse the CPU."""
        return SyncBatchNorm() if self._syncs_batchnorm else None

    @_layer_sync.setter
    def _layer_sync(self, layer_sync: object) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]  # an attribute
        self._syncs_batchnorm = layer_sync is not None or getattr(self, "_syncs_batchnorm", False)

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = ScriptLauncher(self, self.timeout_s, self._given_start_method)
        elif self._given_start_method is not None:
            raise ConfigError(
                f"ddp: start_method={self._given_start_method} was given, but train.py, torchrun or the cluster has "
                "started the processes. Leave it out; it is for plain scripts."
            )

    @override
    def _get_process_group_backend(self) -> str:
        return backend_for(self._process_group_backend, self.root_device)

    @override
    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        self._num_ranks = super().world_size

    @property
    @override
    def world_size(self) -> int:
        return super().world_size if self._num_ranks is None else self._num_ranks  # mostly read from os.environ

    @property
    def process_devices(self) -> list[torch.device]:
        """The devices of this process."""
        return [self.root_device]

    def _only_device(self) -> torch.device | None:
        """The device that the process group is bound to; NCCL then refuses tensors on the process's other devices."""
        devices = self.process_devices
        return devices[0] if len(devices) == 1 and is_accelerator(devices[0]) else None

    @override
    def setup_distributed(self) -> None:
        # as Lightning's, without its reset of the seed, which would change the order of samples from one device's
        if self._launcher is not None:
            prepare_forked(self.timeout_s)
        self._failed, self.stop_signal = False, None
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        assert self.cluster_environment is not None
        self.coordinator = RankCoordinator(self.cluster_environment, self.timeout_s, self.num_nodes)
        if not dist.is_initialized():
            dist.init_process_group(
                self._process_group_backend,
                store=PrefixStore("group", self.coordinator.root_store),
                rank=self.global_rank,
                world_size=self.world_size,
                timeout=self._timeout,
                device_id=self._only_device(),
            )
            leave_group_at_exit()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        give_same_weights(self.module, self.root_device)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self._trainer is not trainer:
            self._trainer = trainer
            # Lightning's handler broadcasts, possibly in the middle of another collective
            put(of_lightning.signal_connector(trainer), sigterm_notifier_fn=self._on_signal)
        if self.coordinator is not None:
            self.coordinator.heartbeat.count_steps = lambda: trainer.global_step
        self._sums = SideGroup(cast(timedelta, self._timeout))  # on all ranks: one alone may request loaders
        self.place(trainer)

    def place(self, trainer: pl.Trainer) -> None:
        """Put the module on this process's devices, wrap it, and make the optimizers."""
        super().setup(trainer)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if self.world_size > 1:
            self.agreement.watch(trainer, self.optimizers)

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ConfigError(
                f"{self.strategy_name}: {type(self.module).__name__} has no parameter that requires a gradient, so "
                "there is nothing to average over ranks. Unfreeze one, or choose strategy=single_device."
            )
        self._trained = ReducedParameters(self.model)
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        if self._hook is not None:
            self.model.register_comm_hook(*self._hook())

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        with self.accumulating(hooked("on_after_backward", self.trainer)):
            yield

    def accumulating(self, seen: bool) -> AbstractContextManager[Any]:
        """Accumulate gradients inside the block without reducing them, where nobody sees the difference.

        `on_after_backward` sees the gradients of all ranks, and may change them. The wrapper records a static graph in
        its first backward pass, and fails if that does not reduce. Averaging a part of the accumulated gradients
        earlier does not change the average of their sum.
        """
        model = of_lightning.model(self)
        if seen or not isinstance(model, DistributedDataParallel):
            return nullcontext()
        if model.static_graph and self._recorded is not model:
            self._recorded = model
            return nullcontext()
        return model.no_sync()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # after the hooks of module and callbacks, which may freeze and unfreeze layers, on all ranks alike
        if self._trained is not None and self._trained.changed(self.optimizers):
            self._reduce_left(self._trained.frozen())
            self.wrap_again()

    def wrap_again(self) -> None:
        """Have the wrapper reduce the parameters as they are now, with those and where they are."""
        if isinstance(self.model, DistributedDataParallel):
            self.model = unwrap(self.model)
            self.configure_ddp()

    def _reduce_left(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the gradients that frozen parameters have accumulated on each rank; reduced ones do not change."""
        some = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        some = self.reduce(some.to(self.root_device), reduce_op="max").tolist()
        for parameter in (p for p, has_gradient in zip(parameters, some, strict=True) if has_gradient):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self.reduce(gradient, reduce_op="mean")

    def verify_trained(self) -> None:
        """Refuse a parameter that was unfrozen too late to be reduced in this step of automatic optimization.

        Raises:
            ConfigError: `training_step` unfroze it.
        """
        if self._trained is not None and self._trained.unfrozen():
            raise ConfigError(
                f"{self.strategy_name}: a parameter was unfrozen within training_step, too late for its gradient "
                "to be reduced over the ranks. Unfreeze it in on_train_batch_start or on_train_epoch_start."
            )

    def _on_signal(self, signum: int, _: object) -> None:
        if self.coordinator is None or self.trainer.state.fn != TrainerFn.FITTING:
            raise SIGTERMException
        self.coordinator.stop_agreement.request(signum)

    def agree_to_stop(self, received: bool) -> bool:
        """Whether all ranks stop now, after a signal to any of them; called before every micro-batch once it is armed.

        Args:
            received: whether this rank was asked to stop by other means than a signal.

        Returns:
            The same answer on all ranks at the same optimizer step. Nothing is communicated unless a stop was
            requested.
        """
        assert self.coordinator is not None
        stopping = self.coordinator.stop_agreement
        stops = stopping.agreed(received, self.trainer.global_step, self.process_devices)
        self.stop_signal = stopping.signal if stops else None
        return stops

    def agree_to_stop_validation(self, received: bool, number: int, num_batches: int, ended: bool) -> bool:
        """Whether all ranks stop within a validation, after a signal to any of them; called after each of its batches.

        Args:
            received: this rank was asked to stop, other than by a signal.
            number: the validation's, in this run.
            num_batches: batches that this rank has finished.
            ended: these are all of this rank's; then it waits for the others.

        Returns:
            The same answer on all ranks once they have ended or stopped.
        """
        assert self.coordinator is not None
        stopping, stretch = self.coordinator.stop_agreement, f"validation {number}"
        stops = stopping.agreed(received, num_batches, self.process_devices, stretch)
        if stops or ended:
            stops = stopping.any_stopped(stops and not ended, num_batches, stretch, self.timeout_s)
            self.stop_signal = stopping.signal if stops else None
        return stops

    def total_loss_weight(self, local: Tensor | float) -> Tensor:
        """Sum a loss's weight over the ranks and divide by their number, as DDP does with gradients.

        Args:
            local: this rank's weight, of shape ().

        Returns:
            The mean of all ranks' weights, on the root device; nothing is read back to the host.
        """
        device, dtype = self.root_device, precise_dtype(self.root_device)
        if isinstance(local, Tensor):
            total = local.detach().to(device, dtype, copy=True)
        else:
            total = scalar(local, device, dtype)
        dist.all_reduce(total)
        return total / self.world_size

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        op = dist.ReduceOp.SUM if mean else reduce_op
        op = getattr(dist.ReduceOp, op.upper()) if isinstance(op, str) else op or dist.ReduceOp.SUM
        # a mean of integers is not an integer: Lightning truncates it, and so epoch means of uneven ranks
        whole = mean and not tensor.is_floating_point()
        result = tensor.to(precise_dtype(tensor.device)) if whole else tensor
        dist.all_reduce(result, op=op, group=group)
        return result.div_(dist.get_world_size(group)) if mean else result

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather the values of all ranks on every rank.

        Args:
            value: any object that can be pickled.

        Returns:
            The values in order of rank.
        """
        return gather_objects(value)

    @override
    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        if self.coordinator is not None:
            self.coordinator.barrier.wait(name or "an unnamed barrier")

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        self._sums = None  # ending it would wait for failed ranks
        if isinstance(self.model, DistributedDataParallel) and self._trained is not None:
            name_unused_parameters(exception, self._trained.reduced)
        if self.coordinator is not None and not isinstance(exception, SIGTERMException):
            self.coordinator.explain(exception)

    @override
    def teardown(self) -> None:
        if self.at_teardown is not None:
            self.at_teardown()
            self.at_teardown = None
        if self.coordinator is not None:
            if not self._failed:
                self.barrier("the end of the run")  # a rank that hangs after the last collective is named
            if self.coordinator.stop_agreement.armed:
                self.stop_signal = self.coordinator.stop_agreement.signal  # even if no step was left to stop at
            self.coordinator.end()
            self.coordinator = None
        if self._sums is not None:
            self._sums.end()
            self._sums = None
        self._trained = None
        self.agreement.end()
        super().teardown()
