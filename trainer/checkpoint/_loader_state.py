"""Save and restore the position of a loader within an epoch, so that a run resumes at the next sample.

The order is reproduced from the random state in which the sampler started. In workers every sample has its own seed,
derived from the epoch's and the sample's place in the epoch, so that what is drawn depends neither on the number of
workers nor of ranks; a stream's batches have seeds of their own, derived from the epoch's, the rank and their index.
"""

import copy
import gc
import multiprocessing
import os
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import chain, islice
from multiprocessing import forkserver
from multiprocessing.queues import Queue
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import torch
from lightning_fabric.utilities.data import sized_len
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch import Generator
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind
from typing_extensions import override

from ...strategies.core import rng
from ...strategies.core.patching import replaced
from ...strategies.data.sampling import RankBatches, in_one_order, num_samples
from ...strategies.data.streams import Around, Divided, Stream
from ...strategies.distributed.processes import ASK_TO_STOP, die_with_starter, fork
from .file_io import CheckpointError

_NEXT = _BaseDataLoaderIter.__next__
POSITION = {"position", "seed", "start", "generators"}


def make_resumable(loader: Any, rank: int) -> Any:
    """Wrap a loader, so that it tracks its position; it is not changed itself.

    Loaders with a `state_dict` of their own (torchdata's `StatefulDataLoader`) keep it.
    """
    if isinstance(loader, Resumable):
        loader.rank = rank
        return loader
    if isinstance(loader, Stream):
        # if all ranks read the same stream, as one device does, its workers have the same seeds, too
        if isinstance(loader.loader, DataLoader):
            loader.loader = make_resumable(loader.loader, 0 if isinstance(loader, Divided) else rank)
    elif hasattr(loader, "state_dict"):
        ends_unknown = isinstance(loader, DataLoader) and sized_len(loader) is None
        return ReadAhead(loader) if ends_unknown and not isinstance(loader, ReadAhead) else loader
    return Resumable(loader, rank)


def stateful(combined: CombinedLoader) -> list[Any]:
    """The loaders that have a state, in the order in which Lightning saves these."""
    return [loader for loader in combined.flattened if hasattr(loader, "state_dict")]


def restore_generators(combined: CombinedLoader, states: Sequence[dict[str, Any]]) -> None:
    """Restore the generators of loaders and samplers at the start of a new epoch."""
    for part, state in zip(stateful(combined), states, strict=False):
        if isinstance(part, Resumable):
            part.load_generators(state)


def verify_states(loaders: Sequence[Any], states: Sequence[Any]) -> None:
    """Refuse states, one per loader that has one, that other loaders have saved."""
    for loader, state in zip(loaders, states, strict=False):  # Lightning compares their number
        if isinstance(loader, Resumable) != POSITION.issubset(state):
            raise CheckpointError(
                f"The checkpoint can't tell a {loader.__class__.__name__} where it was, since the run that wrote it "
                "read its samples another way. Resume with that run's strategy and strategy.batch_size_is, or from a "
                "checkpoint that was saved after an epoch."
            )
        num_batches = sized_len(loader) if isinstance(loader, Resumable) and loader.skips else None
        if num_batches is not None and state["position"] > num_batches:
            raise CheckpointError(
                f"The checkpoint was saved after batch {state['position']} of an epoch, and the training loader has "
                f"{num_batches}: its dataset or its batch size has changed. Resume with the same data, or from one "
                "that was saved after an epoch."
            )


class _Around(Around):
    """A loader around another one, for which it passes: it has its attributes and its class."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # nobody may set it
        return self.loader.__class__

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:  # a trainer is pickled, or copied, with the loader itself
        return _same, (self.loader,)

    def __len__(self) -> int:
        return len(self.loader)  # TypeError if it has none


def _same(loader: Any) -> Any:
    return loader


class ReadAhead(_Around):
    """A loader with a state of its own whose end is unknown, so that a batch more is read than is trained on."""

    before: Any = None  # the state, before the last batch was read

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        self.before = copy.deepcopy(self.loader.state_dict())
        for batch in batches:
            yield batch
            self.before = copy.deepcopy(self.loader.state_dict())


class Resumable(_Around):
    """An iterable with a position.

    Of a DataLoader a copy is read, with a sampler that starts there. Of others, and of an `IterableDataset`, batches
    already taken are read again, with the same random numbers.
    """

    _seed = _position = 0
    _start: dict[str, Any] | None = None  # the random states with which this epoch's order was drawn, once it is
    _pending: dict[str, Any] | None = None  # the state with which the next iteration starts

    def __init__(self, loader: Any, rank: int) -> None:
        super().__init__(loader)
        self.rank = rank
        self._is_loader = isinstance(loader, DataLoader)
        self.skips = self._is_loader and not isinstance(loader.dataset, IterableDataset)
        self._read: Any = copy.copy(loader) if self._is_loader else loader
        if self._is_loader:
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            # DataLoader refuses such an assignment on a loader in use; this one is new
            vars(self._read).update({"_iterator": None, name: _Indices(self, getattr(loader, name))})
            if loader.num_workers:
                self._read._get_iterator = partial(start_workers, self._read, self._read._get_iterator)

    @property
    def _iterator(self) -> Any:
        return self._read._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._read._iterator = iterator

    def state_dict(self) -> dict[str, Any]:
        """The position in the current epoch: batches taken, the random state of its order, and its own generators."""
        # that of a stream is one from which its DataLoader goes on, on one device
        inner: Any = self.loader.loader if isinstance(self.loader, Stream) else None
        seed = inner._seed if isinstance(inner, Resumable) else self._seed
        states = [generator.get_state() for generator in self._generators()]
        return {"position": self._position, "seed": seed, "start": self._start, "generators": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Start the next iteration at the saved position."""
        self._pending = state_dict

    def load_generators(self, state_dict: dict[str, Any]) -> None:
        """Restore the generators of the loader and its sampler for a new epoch."""
        for generator, state in zip(self._generators(), state_dict["generators"], strict=False):
            generator.set_state(state)

    def _generators(self) -> list[Generator]:
        if not self._is_loader:
            return []
        units = getattr(self.batch_sampler, "units", None)  # the sampler that a rank's batches are cut from
        own = (self, self.sampler, self.batch_sampler, getattr(self.batch_sampler, "sampler", None))
        found = (getattr(owner, "generator", None) for owner in (*own, units, getattr(units, "sampler", None)))
        return list({id(generator): generator for generator in found if isinstance(generator, Generator)}.values())

    def __iter__(self) -> Iterator[Any]:
        resumed, self._pending = self._pending, None
        self._position, self._start = (0, None) if resumed is None else (resumed["position"], resumed["start"])
        if self._is_loader:
            self._seed = self._agreed_seed() if resumed is None else resumed["seed"]
            if self.persistent_workers and self._iterator is not None:
                self._draw_seed()  # as an iterator that is new does: what follows is the same after a restart
        return self._counted(iter(self._read) if self.skips else self._begin(lambda: iter(self._read), self.loader))

    def _begin(self, read: Callable[[], Iterator[Any]], source: Any) -> Iterator[Any]:
        """Begin to read a sampler or loader; of an epoch that was begun before what is left, in the same order."""
        if self._start is None:
            states = [generator.get_state() for generator in self._generators()]
            self._start = {"random": rng.capture(), "generators": states}
            return read()
        with rng.isolated():
            rng.restore(self._start["random"])
            self.load_generators(self._start)
            units = read()
            # of a sampler one more, so that one which draws its order at the first index has done so
            head = list(islice(units, self._position, self._position + self.skips))
        shares: Any = source.passes.latest.shares if isinstance(source, (Stream, RankBatches)) else ()
        for _ in range(min(self._position, len(shares))):
            shares.popleft()  # a rank's of batches that were read again
        return chain(head, units)

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        fetch = next_of(batches)
        while True:
            try:
                batch = fetch()
            except StopIteration:
                return
            self._position += 1
            yield batch

    def _agreed_seed(self) -> int:
        """The seed that torch's iterator will draw for this epoch, the same on all ranks that share the loader."""
        batches: RankBatches | None = getattr(self, "rank_batches", None)
        generator = self.generator or torch.default_generator
        before = generator.get_state()
        seed = self._draw_seed()
        generator.set_state(before)
        return seed if batches is None or not self.num_workers else batches.agree(seed)

    def _draw_seed(self) -> int:
        return int(torch.empty((), dtype=torch.int64).random_(generator=self.generator))

    def units(self, sampler: Any) -> Iterator[Any]:
        """Yield what is left of a sampler's indices; those for workers seed them."""
        placed = sampler.placed if isinstance(sampler, RankBatches) else partial(_placed, sampler)
        # with the places of their first samples, or of a stream their own
        for place, indices in self._begin(placed, sampler) if self.skips else enumerate(sampler):
            if not self.num_workers:
                yield indices
            elif self.skips:
                yield _Sent((self._seed, place), indices, type(indices) is list)
            else:
                yield _Sent((self._seed, self.rank, place), indices, False)


class _Indices:
    """A loader's index sampler, started at the loader's position."""

    def __init__(self, owner: Resumable, sampler: Any) -> None:
        self._owner, self._sampler = owner, sampler

    def __iter__(self) -> Iterator[Any]:
        return self._owner.units(self._sampler)


def _placed(units: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Yield the batches of one device as `RankBatches.placed` yields those of a rank."""
    place = 0
    for unit in in_one_order(units, 0, lambda value: value):
        yield place, unit
        place += num_samples(unit)


def next_of(iterator: Any) -> Callable[[], Any]:
    """What does what `next(iterator)` does, without the record that a DataLoader's makes for torch's profiler."""
    # not if `__next__` is patched, a profiler runs, or torch counts what a dataset without a length yields
    recorded: Callable[[], Any] = iterator.__next__
    if type(iterator).__next__ is not _NEXT or iterator._dataset_kind == _DatasetKind.Iterable:
        return recorded

    def fetch() -> Any:
        if iterator._sampler_iter is None or torch.autograd._profiler_enabled():
            return recorded()
        batch = iterator._next_data()
        iterator._num_yielded += 1
        return batch

    return fetch


# Data workers: their random numbers belong to samples, and they outlive signals, but not their rank.


def start_workers(loader: DataLoader[Any], get_iterator: Callable[[], Any]) -> Any:
    """Return what `get_iterator` makes of a loader with workers."""
    if (loader.multiprocessing_context or multiprocessing).get_start_method() == "forkserver":
        forkserver.ensure_running()  # with signals as they are: whatever it starts inherits them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASK_TO_STOP)  # until a worker has handlers of its own
    collects, others = gc.isenabled(), multiprocessing.active_children()
    _watch_until_end_of(os.getpid())
    gc.disable()  # until a worker has set apart what is not its own
    try:
        begin = partial(_begin, threading.current_thread() is threading.main_thread(), collects, loader.worker_init_fn)
        with replaced(loader, "worker_init_fn", begin), replaced(os, "fork", fork):
            iterator: Any = get_iterator()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if collects:
            gc.enable()
        started: set[Any] = set(multiprocessing.active_children()).difference(others)
        for process in started:  # also where their start has failed
            process._popen.terminate = process._popen.kill  # how torch and Python end one that hangs
    if workers := getattr(iterator, "_workers", None):  # whole until its end: garbage is collected in any order
        weakref.finalize(iterator, id, (workers, iterator._index_queues)).atexit = False
    return iterator


@cache
def _watch_until_end_of(_: int) -> None:
    """Have torch's handler fail this process for workers that end, but not for those that Python kills at its end."""
    Finalize(None, signal.signal, (signal.SIGCHLD, signal.SIG_DFL), exitpriority=0)


def _begin(by_main_thread: bool, collects: bool, then: Any, worker_id: int) -> None:
    """Begin in a data worker, which the rank's main thread may have started: outlive signals, but not the rank."""
    # SLURM, systemd and terminals send their signals to all processes of a run. A worker that ended at once would take
    # its rank along before that has saved. torch's own watchdog looks for the rank between two batches only.
    for signum in ASK_TO_STOP:
        # a function, not SIG_IGN, which programs that the dataset starts would inherit
        signal.signal(signum, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASK_TO_STOP)
    gc.freeze()  # the rank's garbage is left alone: a process group would wait for its threads, which are not here
    if collects:
        gc.enable()
    die_with_starter(by_main_thread)
    if then is not None:
        then(worker_id)


class _Sent(NamedTuple):
    """Indices sent to a worker: unpickling them seeds the worker for the batch, or for each of its samples."""

    entropy: tuple[int, ...]
    indices: Any
    each: bool

    @override
    def __reduce__(self) -> Any:
        return _arrive, tuple(self)


def _arrive(entropy: tuple[int, ...], indices: Any, each: bool) -> Any:
    rng.seed_all(*entropy)
    feeder: Any = Queue
    feeder._on_queue_feeder_error = staticmethod(_end)  # in this worker, before its first put
    if each:
        indices = _SeededList(indices)
        indices.entropy = entropy
    return indices


class _SeededList(list[Any]):
    """A batch's indices, before each of which the random streams are seeded for its sample."""

    entropy: tuple[int, ...]

    @override
    def __iter__(self) -> Iterator[Any]:
        seed, first = self.entropy
        for place, index in enumerate(super().__iter__(), first):
            rng.seed_sample(seed, place)
            yield index


def _end(exc: Exception, _: object) -> None:
    """End a worker whose batch can't be pickled: Python drops such an object, and training would hang."""
    traceback.print_exception(exc)
    os._exit(1)  # a thread can't end its process in another way
