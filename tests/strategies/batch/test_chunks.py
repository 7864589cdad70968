"""Sizes of chunks; nested batches are cut, joined again, or refused by name; what the first batch decided is kept."""

import itertools
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_map

from evener.strategies import ConfigError
from evener.strategies.batch.policies import Even, FirstChunk, Policy, Weighted
from evener.strategies.batch.results import ResultStructure
from evener.strategies.batch.structure import BatchStructure, num_samples, verify_batch_dims


def split(batch: Any, sizes: list[int]) -> list[Any]:
    """Cut a batch into one chunk per size."""
    return BatchStructure().split(batch, sizes)


def join(chunks: list[Any], sizes: list[int]) -> Any:
    """Join the results of chunks; the inverse of `split`."""
    return ResultStructure("output").join(chunks, sizes)


class Pair(NamedTuple):
    x: Tensor
    y: Any


@dataclass(frozen=True)
class Sample:
    x: Tensor
    names: list[str]
    scale: float = 1.0


class Graphs:
    """A batch that knows how to split itself."""

    def __init__(self, graphs: list[int]) -> None:
        self.graphs = graphs

    def __len__(self) -> int:
        return len(self.graphs)

    def split(self, sizes: list[int]) -> list["Graphs"]:
        graphs = iter(self.graphs)
        return [Graphs([next(graphs) for _ in range(size)]) for size in sizes]


def rows(*values: float) -> Tensor:
    return torch.tensor([[value] for value in values])


def ones(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.ones(shape) for shape in shapes]


def test_every_level_of_a_nested_batch_is_cut_by_the_same_sizes() -> None:
    """Pain 35: strings and lists are cut, not copied."""
    batch: Any = {
        "pair": Pair(rows(1, 2, 3), ["a", "b", "c"]),
        "sample": Sample(rows(4, 5, 6), ["d", "e", "f"]),
        "list": [rows(7, 8, 9), ("g", "h", "i"), np.arange(3)],
        "graphs": Graphs([1, 2, 3]),
        "scale": torch.tensor(2.0),
        "epoch": 5,
        "split": "train",
        "nothing": None,
    }
    first, second, empty = split(batch, [2, 1, 0])
    assert (first["pair"].x.flatten().tolist(), first["pair"].y) == ([1, 2], ["a", "b"])
    assert (second["pair"].x.flatten().tolist(), second["pair"].y) == ([3], ["c"])
    assert isinstance(second["pair"], Pair)
    assert empty["pair"].x.shape == (0, 1)
    assert first["pair"].x.data_ptr() == batch["pair"].x.data_ptr(), "chunks are views"
    assert (second["sample"].names, second["sample"].scale) == (["f"], 1.0)
    assert (first["list"][1], second["list"][1]) == (("g", "h"), ("i",))
    assert (first["list"][2].tolist(), second["list"][2].tolist()) == ([0, 1], [2])
    assert (first["graphs"].graphs, second["graphs"].graphs) == ([1, 2], [3])
    for chunk in (first, second):
        assert [chunk[key] for key in ("scale", "epoch", "split", "nothing")] == [torch.tensor(2.0), 5, "train", None]


def test_mappings_keep_their_type() -> None:
    for batch in (OrderedDict(x=rows(1, 2)), UserDict(x=rows(1, 2)), defaultdict(list, x=rows(1, 2))):
        chunks = split(batch, [1, 1])
        assert [(type(chunk), chunk["x"].item()) for chunk in chunks] == [(type(batch), 1), (type(batch), 2)]


def shapes(value: Any) -> Any:
    """The shapes of tensors, and all else as it is."""
    if isinstance(value, (Tensor, np.ndarray)):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {key: shapes(child) for key, child in value.items()}
    return [shapes(child) for child in value] if isinstance(value, (list, tuple)) else value


IMAGES = ones((3, 4, 4), (3, 8, 2), (3, 1, 1), (3, 2, 1))
BOXES = ones((4, 4), (4, 4), (4, 4), (5, 4))
CUT: dict[str, tuple[Any, list[int], list[Any]]] = {
    # a batch, the sizes of its chunks, and their shapes
    "images of unequal size": (
        {"label": torch.arange(4), "image": IMAGES, "boxes": [{"box": one} for one in BOXES]},
        [3, 1],
        [
            {"label": (3,), "image": [(3, 4, 4), (3, 8, 2), (3, 1, 1)], "boxes": [{"box": (4, 4)}] * 3},
            {"label": (1,), "image": [(3, 2, 1)], "boxes": [{"box": (5, 4)}]},
        ],
    ),
    "arrays of another number": ({"x": rows(1, 2), "y": [np.zeros(3)]}, [1, 1], [{"x": (1, 1), "y": [(3,)]}] * 2),
    "tensors of different kinds": ([rows(1, 2), torch.arange(2)], [1, 1], [[(1, 1), (1,)]] * 2),
    "strings": ({"text": ["a", "b", "c"], "label": [0, 1, 2]}, [1, 2], [
        {"text": ["a"], "label": [0]}, {"text": ["b", "c"], "label": [1, 2]},
    ]),
    **{
        f"samples of one kind: {both}": ((torch.ones(2, 4), both), [1, 1], [[(1, 4), both[:1]], [(1, 4), both[1:]]])
        for both in (["a", None], [[], [1]])
    },
    "a tensor and a number": ((torch.ones(2, 4), [torch.tensor(1.0), 2]), [1, 1], [[(1, 4), [()]], [(1, 4), [2]]]),
}  # fmt: skip


@pytest.mark.parametrize("name", CUT)
def test_the_convention_says_what_is_cut(name: str) -> None:
    batch, sizes, expected = CUT[name]
    assert [shapes(chunk) for chunk in split(batch, sizes)] == expected


@pytest.mark.parametrize("images", [2, 4])
def test_a_loaders_batch_size_tells_samples_in_lists_from_rows(images: int) -> None:
    """The samples of a stream that all had 3 rows were cut inside, in a loader with batch_size=2."""
    structure = BatchStructure(size=images)
    chunks = structure.split(tuple(tuple(ones(*[shape] * images)) for shape in ((3,), (), (3, 4))), [1, images - 1])
    assert [shapes(chunk[0]) for chunk in chunks] == [[(3,)], [(3,)] * (images - 1)]
    views = BatchStructure(size=4).split({"views": ones((4,), (4,))}, [1, 3])
    assert shapes(views) == [{"views": [(1,), (1,)]}, {"views": [(3,), (3,)]}]  # rows, not samples in a list


def test_what_the_first_batch_has_decided_is_kept() -> None:
    """Where a later batch could be read otherwise: lists of two, and a vector of three, in batches of as many."""
    structure = BatchStructure()
    for num in (4, 3, 2):
        batch = {"x": torch.ones(num, 4), "w": torch.ones(3), "scale": [0.5, 0.25], "views": ones((num, 1), (num, 1))}
        first, _ = structure.split(batch, [1, num - 1])
        assert shapes(first) == {"x": (1, 4), "w": (3,), "scale": [0.5, 0.25], "views": [(1, 1)] * 2}
    with pytest.raises(ConfigError, match=r"batch\['w'\] has 7 rows, and had 3 in the first batch.*\{w: none\}"):
        structure.split({**batch, "w": torch.ones(7)}, [1, 1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (object, r"batch\[1\] is a object, which can't be cut into chunks.*split\(sizes\)"),
        (lambda: pack_sequence([rows(1), rows(2)]), r"batch\[1\] is a PackedSequence"),
        (lambda: rows(1, 2).to_sparse(), r"batch\[1\] is a Tensor, which can't be cut into chunks"),
        (lambda: SimpleNamespace(split=lambda sizes: sizes[1:]), r"SimpleNamespace.split\(\[1, 1\]\) returned 1 parts"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split((rows(1, 2), make()), [1, 1])


def test_a_list_for_a_tensor_is_refused() -> None:
    structure = BatchStructure(verify_batch_dims({"x": "list"}, "dp"))
    with pytest.raises(ConfigError, match=r"\{x: list\} was given for batch\['x'\], a Tensor. Give 0 or none"):
        structure.split({"x": torch.ones(2, 4)}, [1, 1])


@pytest.mark.parametrize("sizes", [[2, 1], [1, 1, 1], [3]])
def test_join_undoes_split(sizes: list[int]) -> None:
    batch = {
        "pair": Pair(rows(1, 2, 3), np.arange(3.0)),
        "meta": [{"id": 1}, {"id": 2}, {"id": 3}],
        "ragged": [torch.zeros(5), torch.ones(4), torch.ones(2)],
        "names": ("a", "b", "c"),
    }
    assert _plain(join(split(batch, sizes), sizes)) == _plain(batch)


def _plain(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, (Tensor, np.ndarray)) else leaf, value)


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (rows(1, 2), 2), ({"n": 3, "x": rows(1)}, 1), ((torch.tensor(1.0), "a"), 2), (torch.tensor(1.0), None),
        ({}, None), (Graphs([1, 2, 3]), 3), ({"text": ["a", "b", "c"], "label": [0, 1, 2]}, 3),
    ],
)  # fmt: skip
def test_samples_are_counted_by_the_first_tensor(batch: Any, count: int | None) -> None:
    assert num_samples(batch) == count


class PackedGraphs:
    """As torch_geometric's batch of graphs, whose `len` counts its attributes."""

    def __init__(self, graphs: list[int]) -> None:
        self.graphs, self.num_graphs = graphs, len(graphs)

    @classmethod
    def from_data_list(cls, graphs: list[int]) -> "PackedGraphs":
        return cls(graphs)

    def to_data_list(self) -> list[int]:
        return self.graphs

    def __len__(self) -> int:
        return 2


def test_graphs_keep_the_places_of_chunks_without_samples() -> None:
    """Found by the zoo: under balanced_dp one graph went to the second device, which had no chunk."""
    chunks = split(PackedGraphs([1, 2, 3]), [0, 2, 1])
    assert [chunk and chunk.graphs for chunk in chunks] == [None, [1, 2], [3]]


@pytest.mark.parametrize(
    ("policy", "num", "expected"),
    [
        (Even(), 10, [3, 3, 2, 2]),
        (Even(), 3, [1, 1, 1, 0]),
        (FirstChunk(1), 10, [1, 3, 3, 3]),
        (FirstChunk(5), 7, [5, 1, 1, 0]),
        (FirstChunk(0), 10, [0, 4, 3, 3]),
        (Weighted((1, 0, 2, 2)), 3, [1, 0, 1, 1]),
        (Weighted((0.1, 0.2, 0.3, 0.4)), 10, [1, 2, 3, 4]),
    ],
)
def test_sizes_by_hand(policy: Policy, num: int, expected: list[int]) -> None:
    assert policy.sizes(num, 4) == expected
    assert policy.sizes(num, 1) == [num] or isinstance(policy, Weighted)  # whose weights are as many as its parts


def test_every_policy_sums_to_the_batch_for_all_small_cases() -> None:
    for num, parts in itertools.product(range(65), range(1, 5)):
        policies = [Even(), *(FirstChunk(size) for size in range(5))]
        policies += [Weighted(weights) for weights in itertools.product((0, 1, 2.5), repeat=parts) if any(weights)]
        for policy in policies:
            sizes = policy.sizes(num, parts)
            assert (len(sizes), sum(sizes), min(sizes) >= 0) == (parts, num, True)
            if isinstance(policy, Weighted):
                exact = [num * weight / sum(policy.weights) for weight in policy.weights]
                assert all(abs(size - share) < 1 for size, share in zip(sizes, exact, strict=True))
