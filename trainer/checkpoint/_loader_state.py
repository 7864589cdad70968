"""Save and restore the position of a loader within an epoch, so that a run resumes at the next sample.

The samples of an epoch depend on the order in which the sampler yields indices, the number of batches taken, and the
random numbers of augmentation. The order is reproduced from the random state in which the sampler started; batches
already taken are skipped without loading them (an `IterableDataset` must be read again). In workers every sample is
loaded with its own seed, derived from the epoch's seed and the sample's place in the order of the epoch, so that what
is drawn depends neither on the number of workers nor on the number of ranks. A stream's batches have seeds of their
own, derived from the epoch's seed, the rank and the batch's index.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from lightning_fabric.utilities.data import sized_len
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch import Generator, Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind
from typing_extensions import override

from ...strategies.core import rng
from ...strategies.data.sampling import RankBatches, in_one_order, num_samples
from ...strategies.data.streams import Around, Divided, Stream
from ._data_worker import Seeded, start_workers
from .file_io import CheckpointError

_NEXT = _BaseDataLoaderIter.__next__
_POSITION = {"position", "seed", "start", "generators"}


def begun_anew(states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The states of loaders at the end of an epoch, without the position of those that have ours."""
    return [{**own, "position": 0, "start": None} if own.keys() >= _POSITION else own for own in states]


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
        return Resumable(loader)
    if hasattr(loader, "state_dict"):
        ends_unknown = isinstance(loader, DataLoader) and sized_len(loader) is None
        return ReadAhead(loader) if ends_unknown and not isinstance(loader, ReadAhead) else loader
    return ResumableLoader(loader, rank) if isinstance(loader, DataLoader) else Resumable(loader)


def stateful(combined: CombinedLoader) -> list[Any]:
    """The loaders that have a state, in the order in which Lightning saves these."""
    return [loader for loader in combined.flattened if hasattr(loader, "state_dict")]


def verify_states(loaders: Sequence[Any], states: Sequence[Any]) -> None:
    """Refuse states, one per loader that has one, that other loaders have saved.

    Raises:
        CheckpointError: the position of a loader can't be given to one with a state of its own, or the reverse; or it
            has fewer batches.
    """
    for loader, state in zip(loaders, states, strict=False):  # Lightning compares their number
        if isinstance(loader, Resumable) != _POSITION.issubset(state):
            raise CheckpointError(
                f"The checkpoint can't tell a {loader.__class__.__name__} where it was, since the run that wrote it "
                "read its samples another way. Resume with that run's strategy and strategy.batch_size_is, or from a "
                "checkpoint that was saved after an epoch."
            )
        num_batches = sized_len(loader) if isinstance(loader, ResumableLoader) else None
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

    before: Any = None
    """The state before the last batch was read."""

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        while True:
            self.before = copy.deepcopy(self.loader.state_dict())
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch


class Resumable(_Around):
    """An iterable with a position: batches already taken are read again, with the same random numbers."""

    rank = 0
    _seed = _position = 0
    _start: dict[str, Any] | None = None
    """The random states with which the order of this epoch was drawn; None until it is."""
    _pending: dict[str, Any] | None = None
    """The state with which the next iteration starts."""

    def state_dict(self) -> dict[str, Any]:
        """The position in the current epoch: batches taken, the random state of its order, and its own generators.

        That of a stream is one from which a `ResumableLoader` goes on, on one device.
        """
        inner: Any = self.loader.loader if isinstance(self.loader, Stream) else None
        seed = inner._seed if isinstance(inner, Resumable) else self._seed
        own = {"position": self._position, "seed": seed, "start": self._start}
        return {**own, "generators": self._generator_states()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Start the next iteration at the saved position."""
        self._pending = state_dict

    def load_generators(self, state_dict: dict[str, Any]) -> None:
        """Restore the generators of the loader and its sampler for a new epoch."""
        for generator, state in zip(self._generators(), state_dict["generators"], strict=False):
            generator.set_state(state)

    def __iter__(self) -> Iterator[Any]:
        self._take_position()
        return self._counted(self._begun(lambda: iter(self.loader), self._read_again))

    def _generators(self) -> list[Generator]:
        return []

    def _generator_states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _take_position(self) -> dict[str, Any] | None:
        resumed, self._pending = self._pending, None
        self._position = 0 if resumed is None else resumed["position"]
        self._start = None if resumed is None else resumed["start"]
        return resumed

    def _begun(
        self, read: Callable[[], Iterator[Any]], skip: Callable[[Iterator[Any]], Iterator[Any]]
    ) -> Iterator[Any]:
        """Begin to read; of an epoch that was begun before what is left, in the same order."""
        if self._start is None:
            self._start = {"random": rng.capture(), "generators": self._generator_states()}
            return read()
        with rng.isolated():
            rng.restore(self._start["random"])
            self.load_generators(self._start)
            return skip(read())

    def _read_again(self, batches: Iterator[Any]) -> Iterator[Any]:
        for _ in range(self._position):
            next(batches)
        _drop_shares(self.loader, self._position)
        return batches

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        fetch = next_of(batches)
        while True:
            try:
                batch = fetch()
            except StopIteration:
                return
            self._position += 1
            yield batch


class ResumableLoader(Resumable):
    """A DataLoader with a position; a copy of it is read, with a sampler that starts there."""

    def __init__(self, loader: DataLoader[Any], rank: int) -> None:
        super().__init__(loader)
        self.rank = rank
        self._copy: Any = copy.copy(loader)
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        # DataLoader refuses such an assignment on a loader in use; this one is new
        vars(self._copy).update({"_iterator": None, name: _Indices(self, getattr(loader, name))})
        if loader.num_workers:
            self._copy._get_iterator = partial(start_workers, self._copy, self._copy._get_iterator)

    @property
    def _iterator(self) -> Any:
        return self._copy._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._copy._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        resumed = self._take_position()
        self._seed = self._agreed_seed() if resumed is None else resumed["seed"]
        if self.persistent_workers and self._iterator is not None:
            self._draw_seed()  # as an iterator that is new does: what follows is the same after a restart
        is_stream = isinstance(self.dataset, IterableDataset)
        batches = self._begun(self._copy.__iter__, self._read_again) if is_stream else iter(self._copy)
        return self._counted(batches)

    def begin(self, base: Any) -> Iterator[tuple[int, Any]]:
        """Start the sampler; yield the batches that are left with the places of their first samples, or their own."""
        if isinstance(self.dataset, IterableDataset):
            return enumerate(base)

        def skip(units: Iterator[Any]) -> Iterator[Any]:
            # Take one more, so that a sampler which draws its order at the first index has done so.
            head = list(islice(units, self._position, self._position + 1))
            _drop_shares(base, self._position)
            return chain(head, units)

        return self._begun(base.placed if isinstance(base, RankBatches) else partial(_placed, base), skip)

    def _generators(self) -> list[Generator]:
        units = getattr(self.batch_sampler, "units", None)  # the sampler that a rank's batches are cut from
        own = (self, self.sampler, self.batch_sampler, getattr(self.batch_sampler, "sampler", None))
        found = (getattr(owner, "generator", None) for owner in (*own, units, getattr(units, "sampler", None)))
        return list({id(generator): generator for generator in found if isinstance(generator, Generator)}.values())

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


class _Indices(_Around):
    """A loader's index sampler, started at the loader's position."""

    def __init__(self, owner: ResumableLoader, base: Any) -> None:
        super().__init__(base)
        self._owner = owner

    def __iter__(self) -> Iterator[Any]:
        owner, is_stream = self._owner, isinstance(self._owner.dataset, IterableDataset)
        for place, indices in owner.begin(self.loader):
            entropy = (owner._seed, owner.rank, place) if is_stream else (owner._seed, place)
            is_batch = not is_stream and type(indices) is list
            yield Seeded(entropy, indices, is_batch) if owner.num_workers else indices


def _drop_shares(source: Any, num: int) -> None:
    """Drop a rank's shares of batches that were read again."""
    shares: Any = source.passes.latest.shares if isinstance(source, (Stream, RankBatches)) else ()
    for _ in range(min(num, len(shares))):
        shares.popleft()


def _placed(units: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Yield the batches of one device as `RankBatches.placed` yields those of a rank."""
    place = 0
    for unit in in_one_order(units, 0, lambda value: value):
        yield place, unit
        place += num_samples(unit)


def next_of(iterator: Any) -> Callable[[], Any]:
    """What does what `next(iterator)` does, without the record that a DataLoader's makes for torch's profiler.

    Not if `__next__` is patched, a profiler runs, or torch counts what a dataset without a length yields.
    """
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
