"""The ranks of a run as one group: begin, sum, wait for each other, stop at one step, name a rank that fails."""

import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn, cast

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric.plugins.environments import ClusterEnvironment
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.distributed import PrefixStore, Work

from ..core.devices import is_accelerator, precise_dtype, scalar
from ..core.errors import ConfigError
from ._barrier import Barrier
from ._heartbeat import HeartbeatMonitor, is_about_communication, place_of
from ._stop import StopAgreement as StopAgreement
from .objects import gather_objects
from .process_exit import leave_group_at_exit
from .reduction import all_reduce
from .signed_store import SecretCheck, signed
from .store import attempt, root_store, wait_for

PATIENCE_S = 5.0
"""Seconds at one place within a collective after which a rank counts as waiting for others."""

_num_runs = 0


def _refuse_alone(rank: int, place: str, other: int, where: str) -> NoReturn:
    raise ConfigError(
        f"Rank {rank} uses a whole tensor of which each rank has a part, at {place}, but rank {other} is at {where}. "
        "All ranks must make such a call: make it on every rank, and use what it returns on rank 0 only."
    )


class RankCoordinator:
    """Connects this rank to the others during one run of a trainer, by a store of the run that all ranks share."""

    def __init__(
        self, environment: ClusterEnvironment, timeout_s: float, num_nodes: int, devices: Sequence[torch.device]
    ) -> None:
        global _num_runs
        rank, num_ranks = environment.global_rank(), environment.world_size()
        _num_runs += 1
        self.root_store = root_store(environment, timeout_s, num_nodes)
        store = signed(PrefixStore(f"run/{_num_runs}", self.root_store), f"run/{_num_runs}", attempt())
        self.barrier = Barrier(store, rank, num_ranks, timeout_s, lambda other: self.heartbeat.where(other))
        self.barrier.join(SecretCheck(self.root_store, rank, [0] if rank else range(1, num_ranks)))
        self.stop_agreement = StopAgreement(rank, num_ranks, store, timeout_s, devices)
        self.heartbeat = HeartbeatMonitor(store, rank, num_ranks, self.stop_agreement, timeout_s)
        self.heartbeat.start()

    def explain(self, exc: BaseException) -> None:
        """Report a failure to the other ranks; if a peer could not be reached, name that peer in the error instead."""
        self.heartbeat.freeze(exc)
        if not is_about_communication(exc):
            self.heartbeat.tell(exc)
        elif culprits := self.heartbeat.culprits():
            exc.args = (f"{culprits} The error on this rank was: {exc}",)


class RankGroup:
    """The ranks of a run; every wait for them is bounded.

    Args:
        timeout_s: seconds that a rank waits for the others before it fails.

    Attributes:
        devices: the devices of this process, the root device first.
        failed: whether the run has failed.
        trainer: the trainer of the run; None before the first.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.timeout = timedelta(seconds=timeout_s)
        self.devices: Sequence[torch.device] = ()
        self.failed = False
        self.coordinator: RankCoordinator | None = None
        self.stop_signal: int | None = None
        """The signal by which all ranks have agreed to stop, if any."""
        self.at_end: Callable[[], None] | None = None
        self._side: dist.ProcessGroup | None = None
        self._verified: set[str] = set()
        self.trainer: pl.Trainer | None = None

    def meet(
        self, environment: ClusterEnvironment, num_nodes: int, backend: str, devices: Sequence[torch.device]
    ) -> None:
        """Join the process group.

        Args:
            devices: of this process; NCCL refuses tensors on others than the only one.
        """
        self.failed, self.stop_signal, self.devices = False, None, devices
        self._verified.clear()
        self.coordinator = RankCoordinator(environment, self.timeout_s, num_nodes, devices)
        if not dist.is_initialized():
            dist.init_process_group(
                backend,
                store=PrefixStore("group", self.coordinator.root_store),
                rank=environment.global_rank(),
                world_size=environment.world_size(),
                timeout=self.timeout,
                device_id=bound_device(devices, backend),
            )
            leave_group_at_exit()

    def begin(self, trainer: pl.Trainer) -> None:
        """Begin a run; every rank must call it."""
        if self.trainer is not trainer:
            self.trainer = trainer
            # Lightning's handler broadcasts, possibly in the middle of another collective
            trainer._signal_connector._sigterm_notifier_fn = self._on_signal
        if self.coordinator is not None:
            self.coordinator.heartbeat.count_steps = lambda: trainer.global_step

    def sum_beside(self, values: Tensor) -> Work:
        """Start summing a small CPU tensor over all ranks, in place, beside the gradients."""
        if self._side is None:
            self._side = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=self.timeout))
        return cast(Work, dist.all_reduce(values, group=self._side, async_op=True))

    def _on_signal(self, signum: int, _: object) -> None:
        if self.failed:
            return  # it is ending, and its error says why; others may have been told so by now, and sent the signal
        if self.coordinator is None or self.trainer is None or self.trainer.state.fn != TrainerFn.FITTING:
            raise SIGTERMException
        self._stopping.request(signum)

    def agree_to_stop(self, received: bool) -> bool:
        """Whether all ranks stop now, after a signal to any of them; called before every micro-batch once it is armed.

        Args:
            received: whether this rank was asked to stop by other means than a signal.

        Returns:
            The same answer on all ranks at the same optimizer step. Nothing is communicated unless a stop was
            requested.
        """
        stops = self._stopping.agreed(received, self._num_steps)
        self.stop_signal = self._stopping.signal if stops else None
        return stops

    @property
    def _stopping(self) -> StopAgreement:
        assert self.coordinator is not None
        return self.coordinator.stop_agreement

    @property
    def _num_steps(self) -> int:
        assert self.trainer is not None
        return self.trainer.global_step

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
        stopping, stretch = self._stopping, f"validation {number}"
        stops = stopping.agreed(received, num_batches, stretch)
        if stops or ended:
            stops = stopping.any_stopped(stops and not ended, num_batches, stretch)
            self.stop_signal = stopping.signal if stops else None
        return stops

    def agree_to_end(self, wished: bool, at_once: bool) -> bool:
        """Whether all ranks end training here, or soon, since one of them is to; called at the same places by all.

        Args:
            wished: this rank's loop would end (`trainer.should_stop`).
            at_once: at a place where ranks may wait for each other, all end if one is to. Elsewhere all do if all are
                to, and nothing is communicated unless a rank wishes.

        Returns:
            The same answer on all ranks.
        """
        stopping = self._stopping
        if not at_once:
            return stopping.ends(wished, self._num_steps)
        ends = any(gather_objects(wished or stopping.is_ending))
        if ends:
            stopping.have_ended()
        else:
            stopping.num_passed += 1
        return ends

    def skip_rest(self, batch_idx: int) -> None:
        """Skip the rest of the epoch from a batch on, as all ranks must."""
        assert self.trainer is not None
        self._stopping.skip(f"in batch {batch_idx} of epoch {self.trainer.current_epoch}")

    def mean(self, local: Tensor | float) -> Tensor:
        """Compute the mean of a number over the ranks, as DDP does with gradients.

        Args:
            local: this rank's number, of shape ().

        Returns:
            The mean, on the root device; nothing is read back to the host.
        """
        device, dtype = self.devices[0], precise_dtype(self.devices[0])
        if isinstance(local, Tensor):
            total = local.detach().to(device, dtype, copy=True)
        else:
            total = scalar(local, device, dtype)
        all_reduce(total)
        return total / dist.get_world_size()

    def wait(self, name: str) -> None:
        """Wait for the other ranks at a place that errors name."""
        if self.coordinator is not None:
            self.coordinator.barrier.wait(name)

    def verify_together(self) -> None:
        """Refuse a call for which ranks need each other, where a line makes it for the first time on some ranks only.

        Raises:
            ConfigError: a rank is at another such call, or in a collective that waits for this rank.
        """
        place = place_of(sys._getframe(1)).partition(" (in ")[0]
        if self.coordinator is None or place in self._verified:
            return
        self._verified.add(place)
        monitor, deadline = self.coordinator.heartbeat, time.monotonic() + self.timeout_s
        store, others = monitor.store, [rank for rank in range(monitor.num_ranks) if rank != monitor.rank]
        store.set(f"together/{len(self._verified)}/{monitor.rank}", place)
        keys = {f"together/{len(self._verified)}/{rank}": rank for rank in others}
        before = monitor.beats(store)
        while missing := [keys[key] for key in wait_for(store, keys, PATIENCE_S)]:
            now = monitor.beats(store)
            alive = all(now[rank].count > before[rank].count for rank in missing)
            waits = all("distributed_c10d" in now[rank].place == before[rank].place for rank in missing)
            if (alive and waits) or time.monotonic() > deadline:
                _refuse_alone(monitor.rank, place, missing[0], now[missing[0]].place)
            before = now
        for key, rank in keys.items():
            if (other := store.get(key).decode()) != place:
                _refuse_alone(monitor.rank, place, rank, other)

    def fail(self, exception: BaseException) -> None:
        """Tell the other ranks why this one fails."""
        self.failed = True
        self._side = None  # ending it would wait for failed ranks
        if self.coordinator is not None and not isinstance(exception, SIGTERMException):
            self.coordinator.explain(exception)

    def end(self) -> None:
        """End the run; every rank must call it."""
        if self.at_end is not None:
            self.at_end()
            self.at_end = None
        if self.coordinator is not None:
            if not self.failed:
                self.wait("the end of the run")  # a rank that hangs after the last collective is named
            if self.coordinator.stop_agreement.armed:
                self.stop_signal = self.coordinator.stop_agreement.signal  # even if no step was left to stop at
            self.coordinator.heartbeat.end()
            self.coordinator = None
        if self._side is not None:
            dist.destroy_process_group(self._side)
            self._side = None


def bound_device(devices: Sequence[torch.device], backend: str) -> torch.device | None:
    """The device that a process group may be bound to: a process's only one, if there is a backend for its type."""
    is_bound = len(devices) == 1 and is_accelerator(devices[0]) and f"{devices[0].type}:" in backend
    return devices[0] if is_bound else None
