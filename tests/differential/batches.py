"""Data sets, batches of every structure, and how a step reads them.

`collate` gives the fields of a batch the structure that was drawn, `unpack` is how the module finds them again. Every
field besides `x` and `y` has a *term* in the loss, so that a field that is cut wrongly changes it.
"""

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, unpack_sequence


class Points(torch.utils.data.Dataset[dict[str, Any]]):
    """Samples: `x` (4,), `y`, and `boxes` (n_i, 4) with n_i from `counts`, in turns."""

    def __init__(self, num: int, counts: tuple[int, ...], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num, 4, generator=generator, dtype=torch.float64).to(torch.get_default_dtype())
        self.y = torch.randint(0, 3, (num,), generator=generator)
        self.counts = [counts[i % len(counts)] for i in range(num)]
        drawn = [torch.randn(count, 4, generator=generator, dtype=torch.float64) for count in self.counts]
        self.boxes = [boxes.to(torch.get_default_dtype()) for boxes in drawn]

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


class Of:
    """What the value of a field is made of: the samples of a batch."""

    def __init__(self, items: list[dict[str, Any]]) -> None:
        self.items, self.boxes = items, [item["boxes"] for item in items]
        self.x = torch.stack([item["x"] for item in items])


class Out(NamedTuple):
    """What the term of a field is made of, besides its value: logits, their means by sample, and the network."""

    mean: Tensor
    logits: Tensor
    net: Any

    def per_box(self, boxes: Any) -> Tensor:
        return torch.stack([(one - box).square().mean() for one, box in zip(self.mean, boxes, strict=True)])

    def apart(self, both: Any) -> Tensor:
        return (self.net(both[0]) - self.net(both[1])).square()


FIELDS: dict[str, tuple[Callable[[Of], Any], Callable[[Any, Out], Tensor]]] = {
    "mask": (lambda of: of.x[:, 0] > 0, lambda v, out: out.mean * v),
    "pair": (lambda of: [of.x + 0.1, of.x * 2], lambda v, out: out.apart(v).mean(1)),
    "unlabelled": (
        lambda of: [torch.cat([of.x + 0.1, of.x * 2, -of.x]), torch.cat([of.x, of.x - 1, of.x * 3])],
        lambda v, out: out.apart(v).mean(),
    ),
    "views": (
        lambda of: (of.x + 0.1, of.x * 2, of.x - 1),
        lambda v, out: torch.stack([out.net(view).mean(1) for view in v]).prod(0),
    ),
    "boxes": (lambda of: of.boxes, lambda v, out: out.per_box(v)),
    "dicts": (
        lambda of: [{"boxes": item["boxes"], "label": item["y"]} for item in of.items],
        lambda v, out: out.per_box([one["boxes"] * (1 + one["label"]) for one in v]),
    ),
    "floats": (lambda of: [float(row[0]) for row in of.x], lambda v, out: out.mean * torch.tensor(v)),
    "strings": (
        lambda of: ["n" * (item["index"] % 5) for item in of.items],
        lambda v, out: out.mean * torch.tensor([float(len(name)) for name in v]),
    ),
    "nested_lists": (
        lambda of: [list(box) for box in of.boxes],
        lambda v, out: out.per_box([torch.stack(list(rows)) for rows in v]),
    ),
    "scalar": (lambda of: torch.tensor(0.7), lambda v, out: out.mean * v),
    "one": (lambda of: torch.tensor([0.7]), lambda v, out: out.mean * v),
    "vector2": (lambda of: torch.tensor([0.1, 0.7]), lambda v, out: out.mean * v.sum()),
    "vector3": (lambda of: torch.tensor([0.1, 0.2, 0.7]), lambda v, out: out.mean * v.sum()),
    "vector4": (lambda of: torch.tensor([0.1, 0.2, 0.4, 0.8]), lambda v, out: out.mean * v.prod()),
    "matrix4": (lambda of: torch.arange(16.0).reshape(4, 4) / 16, lambda v, out: out.mean * v.square().sum()),
    "row": (lambda of: torch.tensor([[0.1, 0.2, 0.7]]), lambda v, out: (out.logits * v).sum(1)),
    "class_weights": (lambda of: torch.tensor([0.1, 0.2, 0.7]), lambda v, out: (out.logits.square() * v).sum(1)),
    "number": (lambda of: 3, lambda v, out: out.mean * v),
    "text": (lambda of: "abcd", lambda v, out: out.mean * len(v)),
    "none": (lambda of: None, lambda v, out: out.mean * (0.0 if v is None else 1.0)),
    "empty": (lambda of: [], lambda v, out: out.mean * len(v)),
    "sizes": (lambda of: [2, 3], lambda v, out: out.mean * float(sum(v))),
    "time_first": (
        lambda of: torch.stack([of.x[:, 0], of.x[:, 1] * 2, of.x[:, 2] - 1]),
        lambda v, out: out.mean * v.transpose(0, 1).square().sum(1),
    ),
    "flat": (
        lambda of: (torch.cat(of.boxes), torch.tensor([len(box) for box in of.boxes])),
        lambda v, out: out.per_box(v[0].split(v[1].tolist())),
    ),
    "packed": (
        lambda of: pack_sequence(of.boxes, enforce_sorted=False), lambda v, out: out.per_box(unpack_sequence(v))
    ),
    "meta": (lambda of: Meta(values=of.x[:, 1].tolist()), lambda v, out: out.mean * torch.tensor(v.values)),
    "shared_meta": (lambda of: Meta(scale=0.5), lambda v, out: out.mean * v.scale),
    "ndarray": (lambda of: np.asarray(of.x[:, 1].numpy()), lambda v, out: out.mean * torch.as_tensor(np.asarray(v))),
    "deque": (
        lambda of: collections.deque(float(row[0]) for row in of.x), lambda v, out: out.mean * torch.tensor(list(v))
    ),
    "index_list": (
        lambda of: [torch.tensor(item["index"]) for item in of.items],
        lambda v, out: out.mean * torch.stack(list(v)),
    ),
    "tuple_of_scalars": (lambda of: (torch.tensor(0.5), torch.tensor(2.0)), lambda v, out: out.mean * v[0] * v[1]),
}  # fmt: skip
"""Fields by name: the value for the samples of a batch, and what it adds to the loss, for each sample or for all."""
EXTRAS = tuple(FIELDS)


def term(kind: str, value: Any, logits: Tensor, net: Any) -> Tensor:
    """What a field adds to the loss: one value per sample, or one for all."""
    return FIELDS[kind][1](value, Out(logits.mean(1), logits, net))


def names(batches: Any) -> list[str]:
    """The fields of a batch, in order."""
    if batches.shape == "zip":
        return ["x", "y", "boxes"]
    return [*batches.extras, "x", "y"] if batches.extras_first else ["x", "y", *batches.extras]


def collate(batches: Any, items: list[dict[str, Any]]) -> Any:
    """A batch with the structure that was drawn."""
    if batches.shape == "zip":
        return tuple(zip(*[(item["x"], item["y"], item["boxes"]) for item in items], strict=True))
    of = Of(items)
    values = {name: FIELDS[name][0](of) for name in batches.extras}
    values |= {name: torch.stack([item[name] for item in items]) for name in ("x", "y")}
    values = {name: values[name] for name in names(batches)}
    more = {name: values[name] for name in batches.extras}
    return SHAPED[batches.shape][0](values, values["x"], values["y"], more)


def unpack(batches: Any, batch: Any) -> dict[str, Any]:
    """The fields of a batch."""
    if batches.shape in ("tuple", "list"):
        return dict(zip(names(batches), batch, strict=True))
    return SHAPED[batches.shape][1](batch)


def _by_name(batch: Any) -> dict[str, Any]:
    return {"x": batch.x, "y": batch.y, **batch.more}


SHAPED: dict[str, tuple[Callable[..., Any], Callable[[Any], dict[str, Any]]]] = {
    "tuple": (lambda values, x, y, more: tuple(values.values()), dict),
    "list": (lambda values, x, y, more: list(values.values()), dict),
    "dict": (lambda values, x, y, more: dict(values), dict),
    "nested": (
        lambda values, x, y, more: {"more": more, "data": [{"x": x}, (y,)]},
        lambda batch: {"x": batch["data"][0]["x"], "y": batch["data"][1][0], **batch["more"]},
    ),
    "deep": (
        lambda values, x, y, more: ([[x]], {"y": {"y": y}, "more": [more]}),
        lambda batch: {"x": batch[0][0][0], "y": batch[1]["y"]["y"], **batch[1]["more"][0]},
    ),
    "dataclass": (lambda values, x, y, more: Record(x, y, more), _by_name),
    "namedtuple": (lambda values, x, y, more: Pair(x, y, more), _by_name),
    "zip": (  # the samples' own, see `collate`
        lambda values, x, y, more: None,
        lambda batch: {"x": torch.stack(batch[0]), "y": torch.stack(batch[1]), "boxes": batch[2]},
    ),
    "ordered": (lambda values, x, y, more: collections.OrderedDict(values), dict),
    "default": (lambda values, x, y, more: collections.defaultdict(list, values), dict),
    "user": (lambda values, x, y, more: collections.UserDict(values), dict),
    "namespace": (lambda values, x, y, more: SimpleNamespace(x=x, y=y, more=more), _by_name),
    "pairs": (
        lambda values, x, y, more: [("x", x), ("y", y), ("more", more)],
        lambda batch: {"x": batch[0][1], "y": batch[1][1], **batch[2][1]},
    ),
}
"""Structures by name: how a batch gets one, and how its fields are found again."""
SHAPES = tuple(SHAPED)
