"""The ranks of a run as one group: begin, sum, wait for each other, stop at one step, name a rank that fails."""

import atexit
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import cast

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric.plugins.environments import ClusterEnvironment
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.distributed import PrefixStore, Store, Work, distributed_c10d

from ..core.devices import is_accelerator, precise_dtype, scalar
from ..core.patching import replaced
from . import survivors
from ._watch import HeartbeatMonitor, heartbeats, place_of
from ._watch import StopAgreement as StopAgreement
from .processes import leave_group
from .store import RANK_FAILED, RankError, another_connection, meet, root_store

_num_runs = 0
_given_up: list[dist.ProcessGroup] = []
SAME_ORDER = "All ranks must reach the same places in the same order."


class RankGroup:
    """The ranks of a run; each wait for them ends after `timeout_s`."""

    stopping: StopAgreement
    """By which the ranks of this run, or the last one, agree on when to stop."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.timeout = timeout_s, timedelta(seconds=timeout_s)
        self.devices: Sequence[torch.device] = ()  # of this process, the root device first
        self.failed = False
        self.heartbeat: HeartbeatMonitor | None = None  # outside of a run
        self.at_end: Callable[[], None] | None = None
        self._side: dist.ProcessGroup | None = None
        self._verified = set[str]()
        self.trainer: pl.Trainer | None = None
        self.survivor = survivors.own

    def meet(self, environment: ClusterEnvironment, backend: str, devices: Sequence[torch.device]) -> None:
        """Join the process group, with the devices of this process."""
        self.failed, self.devices = False, devices
        self._verified.clear()
        self._join(environment)
        if not dist.is_initialized():
            if self.survivor is not None:
                self.survivor.keep_connections()
            self._form(environment, backend, "group", self._root_store)
            atexit.unregister(leave_group)  # registered once, however many groups a process has had
            atexit.register(leave_group)  # whose threads must not outlive what they use

    def _join(self, environment: ClusterEnvironment, name: str = "") -> None:
        """Wait until all ranks have joined the run, or a later group in it, of a name."""
        global _num_runs
        self._rank, self._num_ranks = rank, num_ranks = environment.global_rank(), environment.world_size()
        self._num_waits = 0
        _num_runs += not name
        self._root_store = root_store(environment, self.timeout_s)
        self._store = PrefixStore(f"run/{_num_runs}{name}", self._root_store)
        _, missing = meet(self._store, "joined", rank, num_ranks, "", self.timeout_s)
        if missing:
            ranks = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
            raise RankError(
                f"{ranks} did not join within {self.timeout_s:g} s ({num_ranks - len(missing)} of {num_ranks} did). "
                "See the output of that process; if it only needs more time to start, raise strategy.timeout_s."
            )
        self.stopping = StopAgreement(rank, num_ranks, self._store, self.timeout_s, self.devices)
        self.heartbeat = HeartbeatMonitor(self.stopping)
        self.heartbeat.start()

    def _form(self, environment: ClusterEnvironment, backend: str, name: str, store: Store) -> None:
        with self._connecting():
            dist.init_process_group(
                backend, store=PrefixStore(name, store), rank=self._rank, world_size=self._num_ranks,
                timeout=self.timeout, device_id=bound_device(self.devices, backend),
            )  # fmt: skip

    def _connecting(self) -> AbstractContextManager[None]:
        """Give up connecting where a rank dies without which the others can go on; torch waits for it."""
        if self.survivor is None:
            return nullcontext()
        return replaced(distributed_c10d, "ProcessGroupGloo", survivors.Connecting)

    def meet_again(self, environment: ClusterEnvironment, backend: str, number: int) -> None:
        """Join the process group of those that live, `number` in the run."""
        before, heartbeat = self.stopping, self.heartbeat
        assert heartbeat is not None
        self._side = None
        heartbeat.end()
        if dist.is_initialized():
            _given_up.extend(distributed_c10d._world.pg_map)  # the end of a last reference would wait for threads
            dist.destroy_process_group()
        distributed_c10d._world.group_count = 0  # which a rank has raised that could not form the last group
        RANK_FAILED.clear()
        name = f"/group/{number}"
        self._join(environment, name)
        assert self.heartbeat is not None
        self.heartbeat.count_steps = heartbeat.count_steps
        self.stopping.signal = before.signal
        # a connection of its own, on which nobody else waits behind a thread that is left alone
        self._form(environment, backend, name, another_connection(self._root_store))

    def begin(self, trainer: pl.Trainer) -> None:
        """Begin a run; every rank must call it."""
        if self.trainer is not trainer:
            self.trainer = trainer
            # Lightning's handler broadcasts, possibly in the middle of another collective
            trainer._signal_connector._sigterm_notifier_fn = self._on_signal
        if self.heartbeat is not None:
            self.heartbeat.count_steps = lambda: trainer.global_step

    def sum_beside(self, values: Tensor) -> Work:
        """Start summing a small CPU tensor over all ranks, in place, beside the gradients."""
        if self._side is None:
            with self._connecting():
                self._side = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=self.timeout))
        return cast(Work, dist.all_reduce(values, group=self._side, async_op=True))

    def _on_signal(self, signum: int, _: object) -> None:
        if self.failed:
            return  # it is ending, and its error says why; others may have been told so by now, and sent the signal
        if self.heartbeat is None or self.trainer is None or self.trainer.state.fn != TrainerFn.FITTING:
            raise SIGTERMException
        self.stopping.signal = signum

    @property
    def stop_signal(self) -> int | None:
        """The signal by which all ranks have agreed to stop, if any."""
        return self.stopping.stopped_by if "stopping" in vars(self) else None

    def mean(self, local: Tensor | float) -> Tensor:
        """The mean of a number over the ranks, on the root device; nothing is read back to the host."""
        device, dtype = self.devices[0], precise_dtype(self.devices[0])
        is_tensor = isinstance(local, Tensor)
        total = local.detach().to(device, dtype, copy=True) if is_tensor else scalar(local, device, dtype)
        dist.all_reduce(total)
        return total / dist.get_world_size()

    def wait(self, place: str, rule: str = SAME_ORDER, ahead: int | None = None) -> None:
        """Wait until all ranks have reached this place of a run; an error names one that has not, or is at another.

        Only a rank that won't come can have made as many calls as `ahead` says, see `HeartbeatMonitor`.
        """
        if (heartbeat := self.heartbeat) is None:
            return
        store, own = self._store, self._rank
        self._num_waits += 1
        num = self._num_waits

        def verify_behind() -> None:
            beats = [] if ahead is None else heartbeats(store, self._num_ranks)
            gone = [rank for rank, beat in enumerate(beats) if beat.calls >= (ahead or 0)]
            if gone and not store.check([f"meeting/{num}/all"]):  # it has not met this one
                raise RankError(f"rank {own} waits at {place!r}, but rank {gone[0]} has gone on. {rule}")

        places, missing = meet(store, f"meeting/{num}", own, self._num_ranks, place, self.timeout_s, verify_behind)
        if missing:
            where = "; ".join(f"rank {rank} did not arrive{heartbeat.where(rank)}" for rank in missing)
            all_take_part = "All ranks must take part in collective operations (saving a checkpoint, ending an epoch)."
            told = all_take_part if rule == SAME_ORDER else rule
            raise RankError(f"rank {own} waited {self.timeout_s:g} s at {place!r}: {where}. {told}")
        if apart := [f"rank {rank} is at {other!r}" for rank, other in enumerate(places) if other != place]:
            raise RankError(f"rank {own} waits at {place!r}, but {', '.join(apart)}. {rule}")
        for one in (own, *(() if own else ("all",))) if num > 2 else ():
            store.delete_key(f"meeting/{num - 2}/{one}")  # all ranks that are here have left the one before the last

    def verify_together(self) -> None:
        """Wait for the other ranks where a line first makes a call for which ranks need each other."""
        place = place_of(sys._getframe(1)).partition(" (in ")[0]
        if place not in self._verified:
            self._verified.add(place)
            self.wait(place)

    def fail(self, exception: BaseException) -> None:
        """Tell the other ranks why this one fails."""
        self.failed = True
        self._side = None  # ending it would wait for failed ranks
        if self.heartbeat is not None and not isinstance(exception, SIGTERMException):
            self.heartbeat.explain(exception)

    def end(self) -> None:
        """End the run; every rank must call it."""
        if self.at_end is not None:
            self.at_end()
            self.at_end = None
        if self.heartbeat is not None:
            if not self.failed:
                self.wait("the end of the run")  # a rank that hangs after the last collective is named
            self.stopping.stopped_by = self.stopping.signal  # even if no step was left to stop at
            self.heartbeat.end()
            self.heartbeat = None
        if self._side is not None:
            dist.destroy_process_group(self._side)
            self._side = None


def bound_device(devices: Sequence[torch.device], backend: str) -> torch.device | None:
    """The device that a process group may be bound to: a process's only one, if there is a backend for its type."""
    is_bound = len(devices) == 1 and is_accelerator(devices[0]) and f"{devices[0].type}:" in backend
    return devices[0] if is_bound else None
