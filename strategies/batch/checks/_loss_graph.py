"""Read from autograd's graph whether a loss is the mean over the samples of its batch.

    loss ← sums, constant factors ← means ← operations that keep samples apart ← the batch

Where the graph does not show this, the operation is named. An operation that mixes samples in another dimension than
the first (after a transpose, say) is not found.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from ...core.private import of_torch

_SUMS = {"Add", "Sub", "Rsub", "Neg"}
_COPIES = {"Alias", "Clone", "ToCopy", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Stack", "Unsqueeze"}
_PAIRINGS = {"Add", "Sub", "Mul", "Div", "Maximum", "Minimum", "Where", "Expand", "Repeat"}
_PICKS = {"Index", "MaskedSelect", "Cdist", "Pdist"}
_KEEP_ROWS = {"Cat", "Stack", "Squeeze", "Unsqueeze"}
_ELEMENTWISE = _SUMS | {"Mul", "Div", "Minimum", "Maximum", "Clamp", "ClampMin", "Where", "Exp", "Squeeze", "Unsqueeze"}
_SHIFTS = {"Flip", "Roll"}
_FACTORS = {
    "Mm": ("self", "mat2"), "Addmm": ("mat1", "mat2"), "Bmm": ("self", "mat2"), "Baddbmm": ("batch1", "batch2"),
}  # fmt: skip
"""Products of matrices, and the names by which they save their factors."""

_ROWS: dict[str, Callable[[Node], int]] = {
    "Convolution": lambda node: _shape(node)[0],
    "MkldnnRnnLayer": lambda node: _shape(node, 1)[-2],
    "CudnnRnn": lambda node: _shape(node, 1)[-2],
}
"""Layers of which each row is computed alone: how many they had."""

_NAMES_OF_INDICES = ("indices", "index", "target")
_ADDED_BY_TORCH = {"_DDPSink", "RegisterPostBackwardFunction"}
"""By which torch's DDP and FSDP2 pass tensors on."""

_MEAN, _IGNORED = 1, -100
"""The code of `reduction="mean"`, and the default of `ignore_index`."""
_ROUNDING = 1e-6
"""Of sums of weights, as a fraction."""


class Reading(NamedTuple):
    """What the graph of a loss tells.

    Attributes:
        doubt: the operation because of which the loss may be no mean over samples; empty if the graph shows a mean.
        uneven: how many targets count, where those of some samples count more than those of others, so that it is no
            mean over samples for certain; empty if the graph does not show it.
    """

    doubt: str = ""
    uneven: str = ""


def read_loss(loss: Tensor, num: int, module: nn.Module) -> Reading:
    """Tell whether a loss is a mean over samples.

    Args:
        loss: of shape (), before its backward pass.
        num: samples of its batch.
        module: its parameters and buffers hold no samples.
    """
    if loss.grad_fn is None:
        return Reading()
    doubt = loss.grad_fn.name()
    try:
        graph = _Graph(loss.grad_fn, num, module)
        doubt = graph.doubt()
        return Reading(doubt, graph.uneven() if doubt and num > 1 else "")
    except RuntimeError:  # what an operation has saved was freed, or written to
        return Reading(doubt)


class _Graph:
    def __init__(self, root: Node, num: int, module: nn.Module) -> None:
        kept = (t for t in (*module.parameters(), *module.buffers()) if t.layout is torch.strided)
        self._num, self._storages = num, {of_torch.cdata(t.untyped_storage()) for t in kept}
        self._nodes = _children_first(root)
        self._constant = set[Node]()
        """Nodes that compute something of parameters alone."""
        for node in self._nodes:
            variable, parts = getattr(node, "variable", None), _inputs(node)
            is_constant = bool(parts) and self._constant.issuperset(parts) and not self._looks_up(node)
            if is_constant if variable is None else self._is_kept(variable):
                self._constant.add(node)

    def doubt(self) -> str:
        """See `Reading`."""
        loss_to_means, open_nodes = set[Node](), [self._nodes[-1]]
        while open_nodes:
            node = open_nodes.pop()
            if node in loss_to_means or node in self._constant:
                continue
            loss_to_means.add(node)
            parts = self._summands(node)
            if parts is None and not self._is_mean(node):
                return node.name()
            open_nodes += parts or ()
        means_to_batch = [node for node in self._nodes if node not in loss_to_means and node not in self._constant]
        mixing = next((node for node in means_to_batch if self._mixes(node)), None) or self._centred(loss_to_means)
        return "" if mixing is None else mixing.name()

    def _centred(self, loss_to_means: set[Node]) -> Node | None:
        """The operation on the way from the loss to the model's results that reads values centred over the batch."""
        seen, open_nodes = set[Node](), list(loss_to_means - self._constant)
        while open_nodes:
            node = open_nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            parts = _inputs(node)
            fixed = [_saved(node, name) for part, name in zip(parts, ("self", "other"), strict=False) if part is None]
            if any(map(self._is_centred, (*fixed, _saved(node, "target")))):
                return node
            open_nodes += [part for part in parts if part is not None and _kind(part) in _ELEMENTWISE]
        return None

    def _is_centred(self, values: Any) -> bool:
        """Whether values that a step has not learned have the mean 0 over the batch, and not over each sample."""
        if not isinstance(values, Tensor) or not values.is_floating_point() or values.numel() % self._num:
            return False
        values = values.detach().double()
        small, of_samples = _ROUNDING * values.abs().mean(), values.reshape(self._num, -1).mean(1)
        is_centred = (of_samples.mean().abs() <= small) & (of_samples.abs().max() > small)
        return bool(is_centred & values.frac().any())  # labels of 1 and -1 are centred by chance

    def uneven(self) -> str:
        """See `Reading`. What is multiplied is passed over: the factor may make up for it."""
        seen, open_nodes = set[Node](), [self._nodes[-1]]
        while open_nodes:
            node = open_nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            kind = _kind(node)
            if kind.startswith("NllLoss") and (told := self._targets_differ(node)):
                return told
            if kind not in {"Mul", "Div"}:
                open_nodes += self._summands(node) or ()
        return ""

    def _targets_differ(self, node: Node) -> str:
        """Tell that samples weigh otherwise in a mean over targets, whichever dimension of these is samples."""
        target, weight = _saved(node, "target"), _saved(node, "weight")
        if _saved(node, "reduction") != _MEAN or self._is_kept(target) or target.numel() % self._num:
            return ""
        counted = target != _signed(_saved(node, "ignore_index"))
        weights = counted.double() if weight is None else weight.double()[target.where(counted, 0)] * counted
        num_each = target.numel() // self._num
        for stride in (n for n in range(1, num_each + 1) if not num_each % n):
            of_samples = weights.reshape(-1, self._num, stride).sum((0, 2))
            if of_samples.max() - of_samples.min() <= _ROUNDING * of_samples.max():
                return ""
        num_counted = f"{int(counted.sum())} of {target.numel()} targets count"
        return num_counted if weight is None else f"{num_counted}, by weights of classes"

    def _summands(self, node: Node) -> list[Node] | None:
        """The nodes of which a scalar is a sum, times constants; None if it is none."""
        kind, parts = _kind(node), [part for part in _inputs(node) if part is not None]
        if kind in {"Sum", "Mean"} and parts and _kind(parts[0]) == "Stack":
            return parts
        scaled = kind in {"Mul", "Div"} and self._is_scaled(node, kind)
        is_copy = kind in _COPIES and all(math.prod(_shape(part)) == 1 for part in parts)
        return parts if kind in _SUMS or scaled or is_copy else None

    def _is_scaled(self, node: Node, kind: str) -> bool:
        """Whether one factor is the same for all batches, as far as its value can show."""
        factors = [*_inputs(node), None][:2]
        varying = [i for i, factor in enumerate(factors) if factor is not None and factor not in self._constant]
        if varying != [0] and (varying != [1] or kind == "Div"):
            return False
        i = 1 - varying[0]
        value: Any = _saved(node, ("self", "other")[i])
        if factors[i] is not None or self._is_kept(value):
            return True
        if isinstance(value, Tensor):
            if value.numel() != 1 or (value.is_floating_point() and value.dtype != torch.float64):
                return False
            value = value.item()
        if not isinstance(value, (int, float)) or _is_result(value):
            return False
        return not (value > 1 and value % self._num == 0)  # by as many as samples

    def _is_mean(self, node: Node) -> bool:
        """Whether an operation computes the mean over values of which each sample has as many."""
        if _kind(node) == "Mean":
            return not math.prod(_saved(node, "self_sym_sizes") or ()) % self._num
        read: Any = _saved(node, "self")
        if _saved(node, "reduction") != _MEAN or read is None or read.numel() % self._num:
            return False
        if not _kind(node).startswith("NllLoss"):
            return True
        if _saved(node, "weight") is not None or _signed(_saved(node, "ignore_index")) != _IGNORED:
            return False
        return not bool((_saved(node, "target") == _IGNORED).any())

    def _mixes(self, node: Node) -> bool:
        """Whether an operation between the means and the batch may mix samples."""
        kind, shape, num = _kind(node), _shape(node), self._num
        if isinstance(node, BackwardCFunction):
            return kind not in _ADDED_BY_TORCH
        if (kind in _PICKS and not self._constant.issuperset(_inputs(node))) or math.prod(shape) % num:
            return True
        rows = next((rows(node) for name, rows in _ROWS.items() if kind.startswith(name)), num)
        if rows % num:
            return True
        is_one_per_sample = len(shape) > 2 and not shape[0] % num
        if kind in _FACTORS and not is_one_per_sample and self._both_vary(node, kind):
            return True
        if kind.startswith("ScaledDotProduct") and not is_one_per_sample:
            return True
        is_square = len(shape) > 1 and shape[0] == shape[1] and not shape[0] % num
        if is_square and kind in _PAIRINGS and self._is_stretched(node, shape):
            return True
        dims = (_saved(node, "dims") or (0,)) if kind in _SHIFTS else _saved(node, "dim")
        dims = dims if isinstance(dims, tuple) else () if dims is None else (dims,)
        if kind in _KEEP_ROWS or not dims:
            return False
        num_removed = len(dims) if _saved(node, "keepdim") is False else 0
        sizes = _saved(node, "self_sym_sizes") or (num,) * (len(shape) + num_removed)
        return len(sizes) > 0 and sizes[0] % num == 0 and any(_signed(dim) % len(sizes) == 0 for dim in dims)

    def _is_stretched(self, node: Node, shape: tuple[int, ...]) -> bool:
        """Whether an operation has broadcast what differs between batches."""
        parts = [part for part in _inputs(node) if part is not None and part not in self._constant]
        return any(_shape(part) != shape for part in parts)

    def _both_vary(self, node: Node, kind: str) -> bool:
        """Whether both factors of a matrix product are others for each batch."""
        *_, left, right = _inputs(node)
        if left in self._constant or right in self._constant:
            return False
        factors = zip((left, right), _FACTORS[kind], strict=True)
        without_grad = [name for part, name in factors if part is None]
        return not any(self._is_kept(_saved(node, name)) for name in without_grad)  # read last: it may be recomputed

    def _looks_up(self, node: Node) -> bool:
        """Whether an operation reads of its input what samples of the batch name, as an embedding does."""
        saved = [_saved(node, name) for name in _NAMES_OF_INDICES]
        indices: list[Any] = [i for one in saved for i in (one if isinstance(one, tuple) else (one,))]
        return any(isinstance(i, Tensor) and i.numel() % self._num == 0 and not self._is_kept(i) for i in indices)

    def _is_kept(self, value: Any) -> bool:
        return isinstance(value, nn.Parameter) or (
            isinstance(value, Tensor) and of_torch.cdata(value.untyped_storage()) in self._storages
        )


def _children_first(root: Node) -> list[Node]:
    """All nodes of a graph, each after those that it was computed from."""
    order, seen, stack = list[Node](), set[Node](), [(root, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(part, False) for part in _inputs(node) if part is not None]
    return order


def _inputs(node: Node) -> list[Node | None]:
    return [part for part, _ in node.next_functions]


def _kind(node: Node) -> str:
    return re.sub(r"Backward\d*$", "", node.name())


def _saved(node: Node, name: str) -> Any:
    """What an operation has saved for its backward pass; None if it has saved nothing of that name."""
    return getattr(node, f"_saved_{name}", None)


def _shape(node: Node, i: int = 0) -> tuple[int, ...]:
    """The shape of what an operation has computed, of several results the i-th."""
    metadata = of_torch.input_metadata(node)
    return tuple(metadata[i].shape) if i < len(metadata) else ()


def _is_result(number: float) -> bool:
    """Whether a number looks like one that was read from a float32 tensor: it has more than nine digits, and is one."""
    has_more = isinstance(number, float) and float(f"{number:.9g}") != number
    return has_more and torch.tensor(number, dtype=torch.float32).item() == number


def _signed(number: int) -> int:
    """A number that autograd shows as unsigned."""
    return number - 2**64 if number >= 2**63 else number
