"""Compute losses and logged values of sums over the samples of a batch, which those of its parts make.

A value is computed of numbers that reduce the batch (sums, means, counts, maxima: leaves), and of
these by further operations, whatever they are (`errors.sum() / mask.sum().clamp(min=1)`, `mean.exp()`). Leaves of the
whole batch follow from those of its parts: they add up, with what they are divided by. What comes after is repeated.

    probe      a few samples, whole and in parts: all operations are recorded (`tape.py`)
               → a `Program` of each value that needs one (`program_finder.py`)
    each step  the leaves of the programs are recorded, found again by the lines of the code that compute them
    in the end leaves of all parts, merged → the program → the value of the whole batch (`verdict.py`)

A part whose own value is not what the program makes of its own leaves (other operations ran) has it by samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ...core.devices import precise_dtype

Site = tuple[Any, ...]
"""An operation's name, the lines of code that called it, and how many such calls were before it in the step."""

NUMBER = "by a number"
"""In the site of an operation that adds or multiplies by a number of Python's, which may be another in each step."""

RETURNED = "the loss"
"""Stands for the name of the loss that a training step returns, which need not be logged."""


class Leaf(NamedTuple):
    """A number of a batch, or a few, that merge over its parts.

    Args:
        site: the operation that has it.
        slot: the place among its results, counted from -1 down, or its arguments from 0 on.
        how: `mean`, by what it is divided by; `sum`, `max`, `min`; or `same` in all parts.
        grad: whether it has a graph.
    """

    site: Site
    slot: int
    how: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool = False


@dataclass(frozen=True)
class Ref:
    """A result of an operation of a program, or a leaf, for which `op` is -1."""

    op: int
    k: int


@dataclass(frozen=True)
class Program:
    """How a value is computed from leaves.

    Args:
        ops: name, positional and keyword arguments of each operation.
        out: the value.
    """

    leaves: tuple[Leaf, ...]
    ops: tuple[tuple[str, Any], ...]
    out: Ref = Ref(-1, 0)

    @property
    def sizes(self) -> list[int]:
        """Elements of each leaf's row."""
        return [2 + torch.Size(leaf.shape).numel() for leaf in self.leaves]

    @property
    def size(self) -> int:
        """Elements of all rows."""
        return sum(self.sizes)

    @torch.no_grad()
    def value(self, rows: Sequence[Tensor]) -> Tensor:
        """The value of merged leaves, see `Tape.rows`."""
        return self._computed(list(map(read_leaf, self.leaves, rows)))

    @torch.enable_grad()
    def slopes(self, rows: Sequence[Tensor]) -> dict[int, Tensor]:
        """The gradients of the value by merged leaves, of those that have a graph."""
        leaves = [read_leaf(leaf, row).requires_grad_(leaf.grad) for leaf, row in zip(self.leaves, rows, strict=True)]
        value = self._computed([leaf.clone() for leaf in leaves])
        wanted = {j: leaf for j, leaf in enumerate(leaves) if leaf.requires_grad}
        if not value.requires_grad:  # of sums that nobody has
            return {}
        found = torch.autograd.grad(value, [*wanted.values()], allow_unused=True, materialize_grads=True)
        return dict(zip(wanted, found, strict=True))

    def _computed(self, leaves: Sequence[Any]) -> Tensor:
        results = list[list[Any]]()

        def get(ref: Ref) -> Any:
            return leaves[ref.k] if ref.op < 0 else results[ref.op][ref.k]

        for name, given in self.ops:
            args, kwargs = tree_map_only(Ref, get, given)
            results.append(tree_leaves(operation(name)(*args, **kwargs)))
        return get(self.out).reshape(())

    def merged(self, parts: Sequence[Sequence[Tensor]], device: torch.device | None = None) -> list[Tensor]:
        """Merge the leaves of parts."""
        return [
            merged_rows(torch.stack([row.to(device or row.device) for row in rows]), leaf.how)
            for leaf, rows in zip(self.leaves, zip(*parts, strict=True), strict=True)
        ]

    def fits(self, rows: Sequence[Tensor], value: Tensor) -> Tensor:
        """Whether a part's value is what the program makes of its leaves, of shape ()."""
        own, given = self.value(rows).double(), value.double()
        eps = torch.finfo(value.dtype).eps if value.is_floating_point() else 1e-7
        return torch.isclose(own, given, rtol=max(1e-9, 1e3 * eps), atol=1e-30, equal_nan=True)


Programs = Mapping[str, Program]
"""By the names of logged values; by samples where there is none."""


def row_of(value: Any, count: Any, like: Sequence[Any]) -> Tensor:
    """A leaf as (presence, divisor, elements times divisor), on the device of `value` or of what is `like` it."""
    device = next((one.device for one in (value, *like) if isinstance(one, Tensor)), torch.device("cpu"))
    dtype = precise_dtype(device)

    def flat(one: Any) -> Tensor:
        if isinstance(one, Tensor):
            return one.detach().to(device, dtype).flatten()
        return torch.full((1,), one, dtype=dtype, device=device)  # on the device, since copying it there would wait

    number, by = flat(value), flat(1.0 if count is None else count)
    return torch.cat([torch.ones_like(by), by, torch.where(by == 0, 0.0, number * by)])


def merged_rows(rows: Tensor, how: str) -> Tensor:
    """Merge a leaf of parts, a row of each."""
    present = rows[:, :1] > 0
    total = torch.where(present, rows, 0.0).sum(0)
    if how not in ("max", "min"):
        return total
    sign = 1 if how == "max" else -1
    return torch.cat([total[:2], sign * torch.where(present, sign * rows, -torch.inf).amax(0)[2:]])


def read_leaf(leaf: Leaf, row: Tensor) -> Tensor:
    """The value of a leaf; 0 where no part has computed it."""
    value = row[2:] / row[1] if leaf.how == "mean" else row[2:] / row[0] if leaf.how == "same" else row[2:]
    value = torch.where(row[0] > 0, value, 0.0).reshape(leaf.shape)
    dtype = torch.float32 if leaf.dtype in (torch.float16, torch.bfloat16) else leaf.dtype
    return (value if dtype.is_floating_point else value.round()).to(dtype)


@cache
def operation(name: str) -> Any:
    """The operation of torch that has a name."""
    return reduce(getattr, name.split("."), torch.ops)
