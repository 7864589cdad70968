"""One process per device; gradients averaged by torch's DistributedDataParallel, weighted by what each rank had."""

import signal
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, cast

import pytorch_lightning as pl
import pytorch_lightning.strategies as pl_strategies
import torch
import torch.distributed as dist
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.distributed import PrefixStore, Work
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from .ddp_options import Compression, compression_hook, name_unused_parameters, verified_options
from .devices import precise_dtype
from .exceptions import ConfigError
from .loaders import BatchSizeIs, RankLoaders, Stage, next_share, positions
from .partition import Even, Policy
from .peers import Peers, kubeflow
from .predictions import in_loader_order
from .processes import prepare_forked, start_method
from .randomness import seed_rank
from .sampling import Share
from .traceless import traceless
from .types import Batch
from .weights import loss_weight, weighs_in_loop


class DDPStrategy(pl_strategies.DDPStrategy):
    """One process per device, each with its own part of every global batch.

    Training equals one device's on the same global batch: no sample is dropped or read twice, and each rank's gradient
    counts by its samples (or by the `loss_weight` that the module returns). Evaluation sees every sample once.

    Under `train.py`, torchrun, SLURM or Kubeflow the processes exist already. In a plain script the trainer starts
    them itself, by fork on CPU and by spawn on accelerators, so that the script is not run once per device.

    Args:
        timeout_s: seconds that a rank waits for its peers before it fails.
        batch_size_is: what the loader's batch is. `per_device`: one rank's, so that the global batch is as many times
            larger as there are ranks. `global`: the global batch, divided among the ranks.
        backend: `gloo`, `nccl`, ...; None takes the one that suits the device.
        compression: how gradients travel: `fp16`, `bf16`, `powersgd`, or None for as they are.
        ddp_options: keyword arguments of `torch.nn.parallel.DistributedDataParallel`: `find_unused_parameters`,
            `static_graph`, `gradient_as_bucket_view`, `bucket_cap_mb`, ...

    Raises:
        ConfigError: an option has a value that is not allowed.
    """

    strategy_name = "ddp"

    def __init__(
        self,
        timeout_s: float = 1800.0,
        batch_size_is: BatchSizeIs = "per_device",
        backend: str | None = None,
        compression: Compression | None = None,
        **ddp_options: Any,
    ) -> None:
        if not timeout_s > 0:
            raise ConfigError(f"ddp: timeout_s={timeout_s} is not positive. Give seconds, for example timeout_s=1800.")
        if batch_size_is not in ("per_device", "global"):
            raise ConfigError(f"ddp: batch_size_is={batch_size_is} is unknown. Give per_device or global.")
        self._hook = compression_hook(compression)
        super().__init__(
            cluster_environment=kubeflow(),
            process_group_backend=backend,
            timeout=timedelta(seconds=timeout_s),
            **verified_options(ddp_options),
        )
        self.timeout_s = timeout_s
        self.batch_size_is: BatchSizeIs = batch_size_is
        self.peers: Peers | None = None
        self.stop_signal: int | None = None
        self._trainer: pl.Trainer | None = None
        self._loaders: RankLoaders | None = None
        self._manages_samples = True
        self._share: Share | None = None
        self._scale: Tensor | float = 1.0

    @property
    def policy(self) -> Policy:
        """How a global batch is divided among the ranks."""
        return Even()

    @property
    def share(self) -> Share | None:
        """This rank's part of the batch in hand; None where all ranks count the same."""
        return self._share

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self.cluster_environment.creates_processes_externally:
            return
        method: Any = start_method(self.root_device)
        self._launcher = _MultiProcessingLauncher(self, start_method=method)

    @override
    def setup_distributed(self) -> None:
        # as Lightning's, without its reset of the seed: the order of samples would not be one device's
        if self._launcher is not None:
            prepare_forked()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        assert self.cluster_environment is not None
        self.peers = Peers(self.cluster_environment, self.timeout_s)
        if not dist.is_initialized():
            dist.init_process_group(
                self._process_group_backend,
                store=PrefixStore("group", self.peers.root_store),
                rank=self.global_rank,
                world_size=self.world_size,
                timeout=self._timeout,
                device_id=self.root_device if self.root_device.type != "cpu" else None,
            )

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        connector = trainer._accelerator_connector
        if self._trainer is not trainer:
            self._trainer = trainer
            self._manages_samples = connector.use_distributed_sampler
            connector.use_distributed_sampler = False  # Lightning's sampler pads; ours cuts, in `process_dataloader`
            # Lightning's broadcasts from within the signal handler, amid whatever collective the ranks are in
            trainer._signal_connector._sigterm_notifier_fn = self._on_signal
        if self.peers is not None:
            self.peers.watch.count_steps = lambda: trainer.global_step
        small_sums = dist.new_group(backend="gloo", timeout=cast(timedelta, self._timeout))

        def sum_over_ranks(values: Tensor) -> Work:
            return cast(Work, dist.all_reduce(values, group=small_sums, async_op=True))

        self._loaders = RankLoaders(
            self.global_rank, self.world_size, self.batch_size_is, self.broadcast, sum_over_ranks, self.policy
        )
        super().setup(trainer)

    def _on_signal(self, signum: int, _: object) -> None:
        assert self._trainer is not None
        if self.peers is None or self._trainer.state.fn != TrainerFn.FITTING:
            raise SIGTERMException
        self.peers.stopping.request(signum)

    def agree_to_stop(self, received: bool) -> bool:
        """Whether all ranks stop now, after a signal to any of them; called by all ranks before every micro-batch.

        Args:
            received: this rank was asked to stop, by other means than a signal.

        Returns:
            The same answer on all ranks at the same optimizer step. Nothing is communicated unless a stop was asked
            for.
        """
        assert self.peers is not None
        assert self._trainer is not None
        stopping = self.peers.stopping
        if received and not stopping.armed:
            stopping.request(signal.SIGTERM)
        stops = stopping.armed and stopping.due(self._trainer.global_step)
        self.stop_signal = stopping.signal if stops else None
        return stops

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        if self._hook is not None:
            self.model.register_comm_hook(*self._hook())

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self._loaders is not None
        assert self._trainer is not None
        stage: Stage = "train" if self._trainer.training else "predict" if self._trainer.predicting else "evaluate"
        return self._loaders.process(dataloader, stage, self._manages_samples)

    @override
    def on_train_start(self) -> None:
        assert self._trainer is not None
        self._tell_batch_size(self._trainer)
        if not self._trainer.fit_loop.restarting:  # a resumed run has the streams that it was saved with
            seed_rank(self.global_rank)

    def _tell_batch_size(self, trainer: pl.Trainer) -> None:
        loader = trainer.fit_loop._combined_loader
        size: Any = getattr(loader.flattened[0], "batch_size", None) if loader is not None else None
        if not isinstance(size, int):
            return
        if self.batch_size_is == "per_device":
            sizes = [size] * self.world_size
        else:
            sizes = self.policy.sizes(size, self.world_size)
        rank_zero_info(f"global batch {sum(sizes)} = {_sum_of(sizes)}")

    @override
    def batch_to_device(self, batch: Batch, device: torch.device | None = None, dataloader_idx: int = 0) -> Batch:
        assert self._trainer is not None
        loader = self._trainer.fit_loop._combined_loader
        if self._trainer.training and loader is not None:
            self._share = next_share(loader.flattened[0])
            self._scale = 1.0 if self._share is None else self.world_size * self._share.num / self._share.total
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self.lightning_module is not None
        assert self._trainer is not None
        counts = self._share is None or self._share.num > 0
        with nullcontext() if counts else traceless(self.lightning_module):
            output = super().training_step(*args, **kwargs)
        module_weighs = isinstance(output, dict) and output.get("loss_weight") is not None
        if not counts:
            output = {**(output if isinstance(output, dict) else {"loss": output}), "loss_weight": 0.0}
        if weighs_in_loop(self._trainer):
            self._scale = 1.0
        elif module_weighs:
            own = loss_weight(output, args[0])
            total = self.total_loss_weight(own)
            self._scale = torch.where(total > 0, own / total, 0.0)
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(self._scale, Tensor) or self._scale != 1.0:
            closure_loss = closure_loss * torch.as_tensor(self._scale, dtype=closure_loss.dtype)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def total_loss_weight(self, local: Tensor | float) -> Tensor:
        """Sum a loss's weight over the ranks, and divide it by their number, as DDP does with gradients.

        Args:
            local: this rank's weight, of shape ().

        Returns:
            The mean of all ranks' weights, on the root device; nothing is read back to the host.
        """
        total = torch.as_tensor(local, device=self.root_device).detach()
        total = total.to(precise_dtype(self.root_device), copy=True)
        dist.all_reduce(total)
        return total / self.world_size

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self.lightning_module is not None
        with self.precision_plugin.val_step_context():
            return self.lightning_module.validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self.lightning_module is not None
        with self.precision_plugin.test_step_context():
            return self.lightning_module.test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with self.precision_plugin.predict_step_context():
            return self.lightning_module.predict_step(*args, **kwargs)

    @override
    def on_validation_start(self) -> None:
        # evaluation does not run through the wrapper, whose forward brings rank 0's buffers to all: ranks may have
        # unequal numbers of batches
        if isinstance(self.model, DistributedDataParallel) and self.model.will_sync_module_buffers():
            self.model._sync_buffers()

    @override
    def on_predict_end(self) -> None:
        assert self._trainer is not None
        loop = self._trainer.predict_loop
        if not loop.return_predictions:
            return
        for loader, predictions in zip(cast(Any, loop._combined_loader).flattened, loop._predictions, strict=True):
            merged = in_loader_order(predictions, positions(loader), self.global_rank, self.world_size)
            predictions[:] = merged if self.is_global_zero else predictions

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        op = dist.ReduceOp.SUM if mean else reduce_op
        op = getattr(dist.ReduceOp, op.upper()) if isinstance(op, str) else op or dist.ReduceOp.SUM
        # a mean of whole numbers is not whole: Lightning's cuts it off, and with it every epoch mean of uneven ranks
        whole = mean and not tensor.is_floating_point()
        result = tensor.to(precise_dtype(tensor.device)) if whole else tensor
        dist.all_reduce(result, op=op, group=group)
        return result.div_(dist.get_world_size(group)) if mean else result

    def gather_objects(self, value: Any) -> list[Any]:
        """Bring every rank's value to all ranks.

        Args:
            value: anything that can be pickled.

        Returns:
            The values, by rank.
        """
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    @override
    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        if self.peers is not None:
            self.peers.meeting.wait(name or "a barrier without a name")

    @override
    def on_exception(self, exception: BaseException) -> None:
        if isinstance(self.model, DistributedDataParallel) and self.lightning_module is not None:
            name_unused_parameters(exception, self.lightning_module)
        if self.peers is not None and not isinstance(exception, SIGTERMException):
            self.peers.explain(exception)

    @override
    def teardown(self) -> None:
        if self.peers is not None:
            self.peers.end()
            self.peers = None
        super().teardown()


def _sum_of(sizes: list[int]) -> str:
    """Write sizes as a product where they are equal, as a sum otherwise."""
    if len(set(sizes)) == 1:
        return f"{len(sizes)} ranks × {sizes[0]} samples"
    return f"{' + '.join(map(str, sizes))} samples on {len(sizes)} ranks"
