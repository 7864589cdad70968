"""Data sets, batches of every structure, and how a step reads them.

`collate` gives the fields of a batch the structure that was drawn, `unpack` is how the module finds them again. Every
field besides `x` and `y` has a *term* in the loss, so that a field that is cut wrongly changes it.
"""

import collections
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from .cases import Batches


class Points(torch.utils.data.Dataset[dict[str, Any]]):
    """Samples: `x` (4,), `y`, and `boxes` (n_i, 4) with n_i from `counts`, in turns."""

    def __init__(self, num: int, counts: tuple[int, ...], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num, 4, generator=generator, dtype=torch.float64).to(torch.get_default_dtype())
        self.y = torch.randint(0, 3, (num,), generator=generator)
        self.counts = [counts[i % len(counts)] for i in range(num)]
        self.boxes = [
            torch.randn(count, 4, generator=generator, dtype=torch.float64).to(torch.get_default_dtype())
            for count in self.counts
        ]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index], "boxes": self.boxes[index], "index": index}


class Meta:
    """An object that nothing is known of."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


@dataclass
class Record:
    """A batch as a dataclass."""

    x: Tensor
    y: Tensor
    more: dict[str, Any] = field(default_factory=dict)


class Pair(NamedTuple):
    """A batch as a namedtuple."""

    x: Any
    y: Any
    more: Any


EXTRAS = (
    "mask", "pair", "unlabelled", "views", "boxes", "dicts", "floats", "strings", "nested_lists", "scalar", "one",
    "vector2",
    "vector3", "vector4", "matrix4", "row", "class_weights", "number", "text", "none", "empty", "sizes", "time_first",
    "flat", "packed", "meta", "shared_meta", "ndarray", "deque", "index_list", "tuple_of_scalars",
)  # fmt: skip


def extra(kind: str, items: list[dict[str, Any]]) -> Any:
    """The value of a field for these samples."""
    x = torch.stack([item["x"] for item in items])
    boxes = [item["boxes"] for item in items]
    dtype = x.dtype
    return {
        "mask": lambda: x[:, 0] > 0,
        "pair": lambda: [x + 0.1, x * 2],
        "unlabelled": lambda: [torch.cat([x + 0.1, x * 2, -x]), torch.cat([x, x - 1, x * 3])],
        "views": lambda: (x + 0.1, x * 2, x - 1),
        "boxes": lambda: boxes,
        "dicts": lambda: [{"boxes": box, "label": item["y"]} for box, item in zip(boxes, items, strict=True)],
        "floats": lambda: [float(row[0]) for row in x],
        "strings": lambda: ["n" * (item["index"] % 5) for item in items],
        "nested_lists": lambda: [list(box) for box in boxes],
        "scalar": lambda: torch.tensor(0.7, dtype=dtype),
        "one": lambda: torch.tensor([0.7], dtype=dtype),
        "vector2": lambda: torch.tensor([0.1, 0.7], dtype=dtype),
        "vector3": lambda: torch.tensor([0.1, 0.2, 0.7], dtype=dtype),
        "vector4": lambda: torch.tensor([0.1, 0.2, 0.4, 0.8], dtype=dtype),
        "matrix4": lambda: torch.arange(16, dtype=dtype).reshape(4, 4) / 16,
        "row": lambda: torch.tensor([[0.1, 0.2, 0.7]], dtype=dtype),
        "class_weights": lambda: torch.tensor([0.1, 0.2, 0.7], dtype=dtype),
        "number": lambda: 3,
        "text": lambda: "abcd",
        "none": lambda: None,
        "empty": list,
        "sizes": lambda: [2, 3],
        "time_first": lambda: torch.stack([x[:, 0], x[:, 1] * 2, x[:, 2] - 1]),
        "flat": lambda: (torch.cat(boxes), torch.tensor([len(box) for box in boxes])),
        "packed": lambda: pack_sequence(boxes, enforce_sorted=False),
        "meta": lambda: Meta(values=x[:, 1].tolist()),
        "shared_meta": lambda: Meta(scale=0.5),
        "ndarray": lambda: np.asarray(x[:, 1].numpy()),
        "deque": lambda: collections.deque(float(row[0]) for row in x),
        "index_list": lambda: [torch.tensor(item["index"]) for item in items],
        "tuple_of_scalars": lambda: (torch.tensor(0.5, dtype=dtype), torch.tensor(2.0, dtype=dtype)),
    }[kind]()


def term(kind: str, value: Any, logits: Tensor, net: Any) -> Tensor:
    """What a field adds to the loss: one value per sample, or one for all."""
    mean = logits.mean(1)
    return {
        "mask": lambda: mean * value,
        "pair": lambda: (net(value[0]) - net(value[1])).square().mean(1),
        "unlabelled": lambda: (net(value[0]) - net(value[1])).square().mean(),
        "views": lambda: torch.stack([net(view).mean(1) for view in value]).prod(0),
        "boxes": lambda: _per_box(mean, value),
        "dicts": lambda: _per_box(mean, [one["boxes"] * (1 + one["label"]) for one in value]),
        "floats": lambda: mean * torch.tensor(value),
        "strings": lambda: mean * torch.tensor([float(len(name)) for name in value]),
        "nested_lists": lambda: _per_box(mean, [torch.stack(list(rows)) for rows in value]),
        "scalar": lambda: mean * value,
        "one": lambda: mean * value,
        "vector2": lambda: mean * value.sum(),
        "vector3": lambda: mean * value.sum(),
        "vector4": lambda: mean * value.prod(),
        "matrix4": lambda: mean * value.square().sum(),
        "row": lambda: (logits * value).sum(1),
        "class_weights": lambda: (logits.square() * value).sum(1),
        "number": lambda: mean * value,
        "text": lambda: mean * len(value),
        "none": lambda: mean * (0.0 if value is None else 1.0),
        "empty": lambda: mean * len(value),
        "sizes": lambda: mean * float(sum(value)),
        "time_first": lambda: mean * value.transpose(0, 1).square().sum(1),
        "flat": lambda: _per_box(mean, list(value[0].split(value[1].tolist()))),
        "packed": lambda: _per_box(mean, unpack_sequence(value)),
        "meta": lambda: mean * torch.tensor(value.values),
        "shared_meta": lambda: mean * value.scale,
        "ndarray": lambda: mean * torch.as_tensor(np.asarray(value)),
        "deque": lambda: mean * torch.tensor(list(value)),
        "index_list": lambda: mean * torch.stack(list(value)),
        "tuple_of_scalars": lambda: mean * value[0] * value[1],
    }[kind]()


def _per_box(mean: Tensor, boxes: Any) -> Tensor:
    return torch.stack([(one - box).square().mean() for one, box in zip(mean, boxes, strict=True)])


def names(batches: Batches) -> list[str]:
    """The fields of a batch, in order."""
    if batches.shape == "zip":
        return ["x", "y", "boxes"]
    return [*batches.extras, "x", "y"] if batches.extras_first else ["x", "y", *batches.extras]


def collate(batches: Batches, items: list[dict[str, Any]]) -> Any:
    """A batch with the structure that was drawn."""
    if batches.shape == "zip":
        return tuple(zip(*[(item["x"], item["y"], item["boxes"]) for item in items], strict=True))
    values = {name: extra(name, items) for name in batches.extras}
    values |= {name: torch.stack([item[name] for item in items]) for name in ("x", "y")}
    values = {name: values[name] for name in names(batches)}
    more = {name: values[name] for name in batches.extras}
    x, y = values["x"], values["y"]
    return {
        "tuple": lambda: tuple(values.values()),
        "list": lambda: list(values.values()),
        "dict": lambda: dict(values),
        "ordered": lambda: collections.OrderedDict(values),
        "default": lambda: collections.defaultdict(list, values),
        "user": lambda: collections.UserDict(values),
        "nested": lambda: {"more": more, "data": [{"x": x}, (y,)]},
        "deep": lambda: ([[x]], {"y": {"y": y}, "more": [more]}),
        "dataclass": lambda: Record(x, y, more),
        "namedtuple": lambda: Pair(x, y, more),
        "namespace": lambda: SimpleNamespace(x=x, y=y, more=more),
        "pairs": lambda: [("x", x), ("y", y), ("more", more)],
    }[batches.shape]()


def unpack(batches: Batches, batch: Any) -> dict[str, Any]:
    """The fields of a batch."""
    return {
        "tuple": lambda: dict(zip(names(batches), batch, strict=True)),
        "list": lambda: dict(zip(names(batches), batch, strict=True)),
        "zip": lambda: {"x": torch.stack(batch[0]), "y": torch.stack(batch[1]), "boxes": batch[2]},
        "dict": lambda: dict(batch),
        "ordered": lambda: dict(batch),
        "default": lambda: dict(batch),
        "user": lambda: dict(batch),
        "nested": lambda: {"x": batch["data"][0]["x"], "y": batch["data"][1][0], **batch["more"]},
        "deep": lambda: {"x": batch[0][0][0], "y": batch[1]["y"]["y"], **batch[1]["more"][0]},
        "dataclass": lambda: {"x": batch.x, "y": batch.y, **batch.more},
        "namedtuple": lambda: {"x": batch.x, "y": batch.y, **batch.more},
        "namespace": lambda: {"x": batch.x, "y": batch.y, **batch.more},
        "pairs": lambda: {"x": batch[0][1], "y": batch[1][1], **batch[2][1]},
    }[batches.shape]()


SHAPES = (
    "tuple", "list", "dict", "nested", "deep", "dataclass", "namedtuple", "zip", "ordered", "default", "user",
    "namespace", "pairs",
)  # fmt: skip
