"""Nested batches are cut by sizes, joined again, or refused by name."""

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cutting import join, split
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from evener.strategies import ConfigError
from evener.strategies.batch.structure import num_samples


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


def test_tensors_are_cut_along_dimension_0_as_views() -> None:
    batch = torch.arange(6.0).reshape(3, 2)
    first, second, third = split(batch, [1, 0, 2])
    assert first.tolist() == [[0, 1]]
    assert second.shape == (0, 2)
    assert third.tolist() == [[2, 3], [4, 5]]
    assert third.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()


def test_every_level_of_a_nested_batch_is_cut_by_the_same_sizes() -> None:
    """Pain 35: strings and lists are cut, not copied."""
    batch = {
        "pair": Pair(rows(1, 2, 3), ["a", "b", "c"]),
        "sample": Sample(rows(4, 5, 6), ["d", "e", "f"]),
        "list": [rows(7, 8, 9), ("g", "h", "i"), np.arange(3)],
        "scale": torch.tensor(2.0),
        "epoch": 5,
        "split": "train",
        "nothing": None,
    }
    first, second = split(batch, [2, 1])
    assert (first["pair"].x.flatten().tolist(), first["pair"].y) == ([1, 2], ["a", "b"])
    assert (second["pair"].x.flatten().tolist(), second["pair"].y) == ([3], ["c"])
    assert isinstance(second["pair"], Pair)
    assert (second["sample"].names, second["sample"].scale) == (["f"], 1.0)
    assert (first["list"][1], second["list"][1]) == (("g", "h"), ("i",))
    assert (first["list"][2].tolist(), second["list"][2].tolist()) == ([0, 1], [2])
    for chunk in (first, second):
        assert [chunk[key] for key in ("scale", "epoch", "split", "nothing")] == [torch.tensor(2.0), 5, "train", None]


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, lambda d: defaultdict(list, d)])
def test_mappings_keep_their_type(kind: Any) -> None:
    batch = kind({"x": rows(1, 2)})
    chunks = split(batch, [1, 1])
    assert [type(chunk) for chunk in chunks] == [type(batch)] * 2
    assert [chunk["x"].item() for chunk in chunks] == [1, 2]
    assert batch["x"].shape == (2, 1)


def test_images_of_unequal_size_are_samples() -> None:
    images = [torch.zeros(3, 4, 4), torch.zeros(3, 8, 2), torch.zeros(3, 1, 1), torch.zeros(3, 1, 1)]
    boxes = [{"box": torch.zeros(count, 4)} for count in (4, 4, 4, 5)]
    first, second = split({"label": torch.arange(4), "image": images, "boxes": boxes}, [3, 1])
    assert [len(first["image"]), len(second["image"])] == [3, 1]
    assert second["image"][0] is images[3]
    assert second["boxes"][0] is boxes[3]


def test_three_images_of_three_channels_are_three_samples() -> None:
    images = [torch.zeros(3, 4, 4), torch.zeros(3, 8, 2), torch.zeros(3, 1, 1)]
    first, second = split({"label": torch.arange(3), "image": images}, [2, 1])
    assert [image.shape for image in (*first["image"], *second["image"])] == [image.shape for image in images]


@pytest.mark.parametrize("shared", [rows(1, 2, 3), [np.zeros(3)]])
def test_values_of_another_number_of_rows_are_shared(shared: Any) -> None:
    first, second = split({"x": rows(1, 2), "y": shared}, [1, 1])
    assert len(first["x"]) == len(second["x"]) == 1
    for chunk in (first, second):
        assert np.shape(chunk["y"]) == np.shape(shared)


def test_tensors_of_different_kinds_are_a_structure() -> None:
    first, second = split([rows(1, 2), torch.arange(2)], [1, 1])
    assert [tensor.item() for tensor in first] == [1, 0]
    assert [tensor.item() for tensor in second] == [2, 1]


def test_an_object_may_split_itself() -> None:
    batch = {"graphs": Graphs([1, 2, 3]), "y": rows(1, 2, 3)}
    assert [chunk["graphs"].graphs for chunk in split(batch, [1, 2])] == [[1], [2, 3]]
    assert num_samples(Graphs([1, 2, 3])) == 3


def test_a_batch_of_strings_is_cut() -> None:
    batch = {"text": ["a", "b", "c"], "label": [0, 1, 2]}
    assert num_samples(batch) == 3
    assert split(batch, [1, 2])[1] == {"text": ["b", "c"], "label": [1, 2]}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((rows(1, 2), object()), r"batch\[1\] is a object, which can't be cut into chunks.*split\(sizes\)"),
        ((rows(1, 2), pack_sequence([rows(1), rows(2)])), r"batch\[1\] is a PackedSequence"),
        ((rows(1, 2), rows(1, 2).to_sparse()), r"batch\[1\] is a tensor of layout torch.sparse_coo"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(batch: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split(batch, [1, 1])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_without_a_shape_is_refused_by_name() -> None:
    # it was torch's "Internal error: NestedTensorImpl doesn't support sizes"
    batch = {"x": torch.nested.nested_tensor([rows(1, 2), rows(3)], layout=torch.strided), "y": rows(1, 2)}
    for use in (num_samples, lambda batch: split(batch, [1, 1])):
        with pytest.raises(ConfigError, match=r"nested tensor of layout torch.strided.*one tensor per sample"):
            use(batch)


def test_a_wrong_split_method_is_refused() -> None:
    class Wrong:
        def split(self, sizes: list[int]) -> list[int]:
            return sizes[1:]

    with pytest.raises(ConfigError, match=r"Wrong.split\(\[1, 1\]\) returned 1 parts"):
        split({"x": rows(1, 2), "y": Wrong()}, [1, 1])


@pytest.mark.parametrize(
    "batch",
    [
        rows(1, 2, 3),
        [rows(1, 2, 3), ("a", "b", "c")],
        {"x": Pair(rows(1, 2, 3), np.arange(3.0)), "meta": [{"id": 1}, {"id": 2}, {"id": 3}]},
        {"label": torch.arange(3), "ragged": [torch.zeros(5), torch.ones(4), torch.ones(2)]},
    ],
)
@pytest.mark.parametrize("sizes", [[2, 1], [1, 1, 1], [3]])
def test_join_undoes_split(batch: Any, sizes: list[int]) -> None:
    joined = join(split(batch, sizes), sizes)
    torch.testing.assert_close(_plain(joined), _plain(batch), rtol=0, atol=0)


def _plain(value: Any) -> Any:
    """Every string as its bytes, which `assert_close` compares."""
    if isinstance(value, str):
        return list(value.encode())
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    return [_plain(child) for child in value] if isinstance(value, (list, tuple)) else value


def test_scalars_are_joined_to_the_mean_weighted_by_samples() -> None:
    chunks = [{"loss": torch.tensor(3.0), "acc": 0.5}, {"loss": torch.tensor(6.0), "acc": 1.0}]
    joined = join(chunks, [2, 1])
    assert joined["loss"].item() == (3 * 2 + 6) / 3
    assert joined["acc"] == (0.5 * 2 + 1.0) / 3


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([torch.zeros(4, 4), torch.zeros(4, 4)], "output has 4 rows in parts of 2 and 1 samples"),
        ([{"a": rows(1, 2)}, {"b": rows(3)}], "output differs between parts in its keys"),
    ],
)
def test_results_that_cannot_be_joined_are_refused_by_name_where_they_are_used(chunks: list[Any], message: str) -> None:
    joined = join(chunks, [2, 1])
    with pytest.raises(ConfigError, match=message):
        joined + 1


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (rows(1, 2), 2),
        ({"n": 3, "x": rows(1)}, 1),
        ((torch.tensor(1.0), "a"), 2),
        (torch.tensor(1.0), None),
        ({}, None),
    ],
)
def test_samples_are_counted_by_the_first_tensor(batch: Any, count: int | None) -> None:
    assert num_samples(batch) == count
