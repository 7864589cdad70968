"""Do a section of training once more, on the ranks that live, where a rank has died in it.

| what a survivor has | once the section begins again |
|---|---|
| weights, optimizers | as they are: no section changes them before it counts |
| counters of loops, attributes of module, callbacks and schedulers, buffers | as before the section |
| metrics, values logged for the epoch, loss weights, random streams, positions | as each rank, the dead one too, has |
| | left them on the board; carried over to fewer ranks as those of a checkpoint are |
| points logged | the first rank cuts the files back to where they ended before the section; others come again |
"""

import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import is_dataclass
from threading import Thread
from typing import Any, TypeVar

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import LBFGS

from ...strategies.core import rng
from ...strategies.core.module_checks import callbacks_of
from ...strategies.core.patching import Kept, replaced
from ...strategies.data.loaders import source_of
from ...strategies.distributed.store import RankError
from ...strategies.distributed.survivors import Survivor
from ...strategies.sharding.whole import map_tensors
from ..loggers import journal
from ..logging.exchange import end_step
from . import _position
from ._loader_state import restore_generators, stateful

_T = TypeVar("_T")
_FEW = 64
"""Entries of a dictionary of attributes that is copied before each section."""


class Sections:
    """The sections of one run of the fit loop."""

    def __init__(self, trainer: Any, survivor: Survivor) -> None:
        self._trainer, self._survivor = trainer, survivor
        self._is_armed = self._is_open = False
        self.ends = False  # whether the section that is open ends with the work in process
        self.reads = True  # whether the loop is within an epoch, of which batches are left
        self._works: list[Callable[[], Any]] = []
        self._num_counted = 0
        self._before = _Before(trainer)
        self._is_first: bool = trainer.is_global_zero

    @classmethod
    def of(cls, trainer: Any, survivor: Survivor) -> "Sections | None":
        """Those of a run; None if its ranks can't go on without others all the same."""
        why = {
            "steps see whole batches (strategy.global_view)": trainer.strategy.sync.evaluates_together,
            "optimization is manual": not trainer.lightning_module.automatic_optimization,
            "LBFGS computes a step several times": any(isinstance(one, LBFGS) for one in trainer.optimizers),
        }
        if found := next((reason for reason, holds in why.items() if holds), None):
            rank_zero_warn(f"launcher.survive=true has no effect: {found}. A rank that dies ends the others.")
            return None
        return cls(trainer, survivor)

    def run(self, work: Callable[[], _T], counts: bool = True) -> _T:
        """Do what ranks do together, and all since the last section that counts once more if one dies in it.

        Args:
            work: changes no weights; code between two calls has no effect that matters.
            counts: whether the section ends here; else it goes on with the next call.
        """
        if not self._is_armed:
            return work()
        if self._is_open:  # a part of other work
            self.ends |= counts
            return work()
        if not self._works:
            self._before.keep()
        self._works.append(work)
        number, self.ends, again = self._num_counted, counts, False
        while True:
            try:
                if again:
                    self._regroup()
                self._is_open = True
                for earlier in self._works[:-1] if again else ():
                    with suppress(StopIteration):
                        earlier()
                result = work()
                if self.ends:
                    self.count()
                return result
            except StopIteration:
                raise
            except Exception as exc:  # whatever waits for a rank that has died
                if self._num_counted != number or not self._survivor.has_lost(exc):
                    raise
            finally:
                self._is_open = False
            again = True  # the error's frames hold nothing any more

    def step(self, work: Callable[[], None]) -> None:
        """Train a batch; from the end of the first one on ranks can go on without others."""
        if self._is_armed:
            self.run(work, counts=False)
            return
        with replaced(self, "_is_open", True):
            work()
            self.count()
        self._is_armed = True
        self._survivor.arm()

    def count(self) -> None:
        """Have the section count, on this rank once it does on all: weights may change."""
        if not self._is_open:
            return
        loop, strategy = self._trainer.fit_loop.epoch_loop, self._trainer.strategy
        if self._trainer.training and loop._results.pending is not None:
            end_step(loop._results)
        self._survivor.commit(self._record(journal.ends(self._trainer)))
        strategy.sync.settle()
        self._num_counted += 1
        self._works.clear()
        self._is_open = False

    def end(self) -> None:
        """End: from here on a rank that dies ends the others."""
        self._is_armed = False
        self._survivor.arm(False)
        self._survivor.when_first.clear()
        self._before.forget()  # which holds iterators, whose workers end with them
        self._works.clear()

    def _record(self, ends: dict[str, int]) -> bytes:
        # torch's pickles take a hundred times as long
        own = map_tensors({"random": rng.capture(), **_position.capture_own(self._trainer)}, _as_array)
        return pickle.dumps((own, ends), pickle.HIGHEST_PROTOCOL)

    def _regroup(self) -> None:
        trainer, survivor, since_s = self._trainer, self._survivor, time.monotonic()
        strategy = trainer.strategy
        new = survivor.regroup(strategy.group.timeout_s)
        self._before.restore()
        strategy.regroup(new)
        loop, num = trainer.fit_loop.epoch_loop, len(new.kept)
        for one in (loop._results, loop.val_loop._results):
            vars(one).pop("ranks", None)
            one.quick.clear()
            for key in [key for key, series in one.items() if series.is_tensor]:  # of a validation none count yet
                del one[key]
        left = [apply_to_collection(pickle.loads(one), np.ndarray, torch.from_numpy) for one in new.records]
        states: list[Any] = [{**own, "gradients": None} for own, _ in left]
        state = _position.state_for(states, new.rank, num, trainer.lightning_module)
        self._share_loaders(new.rank, num, state["loaders"])
        _position.restore(trainer, state, begins_epoch=False)
        if trainer.is_global_zero:
            journal.go_on(trainer.loggers, left[0][1])
            if not self._is_first:  # in the place of one that has died
                self._is_first = True
                if others := [type(one).__name__ for one in trainer.loggers if not isinstance(one, journal.KEPT)]:
                    raise RankError(f"{others[0]} can't be continued by another process.")
                for take_over in survivor.when_first:
                    take_over()
        survivor.ready(self._record(journal.ends(trainer)))
        rank_zero_info(
            f"{num} {'rank goes' if num == 1 else 'ranks go'} on with step {trainer.global_step} after "
            f"{time.monotonic() - since_s:.2f} s."
        )

    def _share_loaders(self, rank: int, num: int, states: list[dict[str, Any]]) -> None:
        """Read what is left of the epoch in other parts."""
        fit_loop, loop = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        combined, fetcher = fit_loop._combined_loader, fit_loop._data_fetcher
        evaluated = loop.val_loop._combined_loader
        for loader in (*combined.flattened, *(() if evaluated is None else evaluated.flattened)):
            source: Any = source_of(loader)
            if source is not None:
                source.rank, source.num_ranks = rank, num
        if not self.reads:
            restore_generators(combined, states)
            return
        before = [one for one in combined._iterator.iterators if hasattr(one, "close")]
        for loader, state in zip(stateful(combined), states, strict=True):
            loader.load_state_dict(state)
        iter(fetcher)
        fetcher.fetched += loop.batch_progress.current.ready
        loop._make_plan(fetcher)
        # its workers may be in the middle of a batch
        Thread(target=lambda: [one.close() for one in before], name="evener-readers", daemon=True).start()


def _as_array(one: Tensor) -> Any:
    try:
        return one.detach().numpy()
    except (RuntimeError, TypeError):  # numpy has no such tensors
        return one


class _Before:
    """What survivors had before a section, apart from what is on the board."""

    def __init__(self, trainer: Any) -> None:
        loops = (trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop)
        automatic = loops[1].automatic_optimization
        counters = [one for loop in (*loops, automatic) for value in vars(loop).values() for one in _counters(value)]
        self._trainer = trainer
        contract = trainer.strategy.contract
        self._owners = [
            *loops, *counters, automatic, loops[1]._results, loops[2]._results, trainer,
            trainer.state, trainer._logger_connector, trainer.lightning_module,
            contract, contract.metrics, trainer.strategy.structures.lists,
        ]  # fmt: skip
        self._kept = Kept(())
        self._buffers: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._modes: list[tuple[Any, bool]] = []

    def keep(self) -> None:
        trainer = self._trainer
        owners = [*self._owners, *callbacks_of(trainer), *(one.scheduler for one in trainer.lr_scheduler_configs)]
        spaces = [vars(owner) for owner in owners]
        spaces += [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self._kept = Kept(spaces, most=_FEW)
        buffers, layers = self._buffers, list(trainer.lightning_module.modules())
        self._buffers = {}
        for one in [one for layer in layers for one in layer._buffers.values() if one is not None]:
            known = buffers.get(id(one))
            if known is None or known[0] is not one or known[1] != one._version:
                known = (one, one._version, one.detach().clone())
            self._buffers[id(one)] = known
        self._modes = [(layer, layer.training) for layer in layers]

    def restore(self) -> None:
        self._trainer._logger_connector._leave_batch()
        self._kept.restore()
        for one, version, copy in self._buffers.values():
            if one._version != version:
                one.detach().copy_(copy)
        for layer, mode in self._modes:
            layer.training = mode

    def forget(self) -> None:
        self._kept, self._modes = Kept(()), []


def _counters(value: Any) -> list[Any]:
    if not is_dataclass(value):
        return []
    return [value, *(one for part in vars(value).values() for one in _counters(part))]
