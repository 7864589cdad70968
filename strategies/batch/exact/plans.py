"""Give the losses of parts of a batch the gradients that they have in the whole batch's loss.

A loss is computed by a program (`values.py`) of numbers that reduce the batch, its leaves: L = f(l_1, ..., l_n). With
m_j leaf j of the whole batch, merged of those of the parts, the gradient that enters leaf j of part p is
df/dl_j(m) * w_pj, where w_pj is the part's fraction of a mean, 1 for a sum, its share for what all parts have alike.

    by samples    what parts of a mean over samples have: nothing is read in a step
    one weight    the whole loss counts by one leaf, as by a `loss_weight`
    all leaves    gradients are put in the place of those of the part's own loss, once the leaves of all parts are known

That a plan is right is not decided here but by gradients, in `verifier.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from .values import RETURNED, Leaf, Program, Seen, Tape, program_of

Number: TypeAlias = Tensor | float
Gradients: TypeAlias = tuple[Tensor | None, ...]

_CLAMPS = ("clamp", "maximum", "minimum", "max.other", "min.other")
"""Operations by which a number of the whole batch is another function of it than a part's."""


@dataclass(frozen=True)
class Plan:
    """How the loss of a part is weighted.

    Args:
        program: of the loss; None for a mean over samples.
        base: the leaf by which the whole loss counts; None if the gradient of each leaf is put in its place.
        is_linear: whether these gradients are those of any part, so that it may go backward as soon as it is known.
    """

    program: Program | None = None
    base: int | None = None
    is_linear: bool = False

    @property
    def is_of_samples(self) -> bool:
        """Whether the loss is a mean over samples, so that nothing need be read in a step."""
        return self.program is None

    @property
    def needs_all(self) -> bool:
        """Whether the gradients of leaves are put in their place, for which those of all parts must be known.

        One part after the other can do with its own if `is_linear`.
        """
        return self.program is not None and self.base is None


OF_SAMPLES = Plan()
"""The plan of a mean over samples."""


def proposals(whole: Seen, cuts: Sequence[Sequence[Seen]], name: str = RETURNED) -> Iterator[Plan]:
    """Yield plans of a loss that was logged under a name, the cheapest first."""
    program = program_of(name, whole, cuts)
    if program is None:
        yield OF_SAMPLES
        return
    pieces = [whole, *(piece for cut in cuts for piece in cut)]
    if all((leaf.grad and leaf.how == "sum") or _follows_samples(leaf, pieces) for leaf in program.leaves):
        yield OF_SAMPLES
    yield from (Plan(program, j) for j in range(len(program.leaves)) if _is_weight(program, j, pieces))
    if not any(leaf.how in ("max", "min") for leaf in program.leaves):
        yield Plan(program, is_linear=_is_linear(program, pieces))


def _is_weight(program: Program, base: int, pieces: Sequence[Seen]) -> bool:
    """Whether a program of any leaves is the mean of its values of parts by one leaf, or what that divides by.

    Counts that are the same in all pieces are the same in all batches.
    """
    is_count = [leaf.how == "mean" or (leaf.how == "sum" and not (leaf.grad or leaf.shape)) for leaf in program.leaves]
    if program.leaves[base].shape or not is_count[base] or any(c in name for name, *_ in program.ops for c in _CLAMPS):
        return False
    draw, one = partial(torch.randint, 1, 50, generator=torch.Generator()), torch.ones(3, 1)
    columns, alike, weights = list[Tensor](), dict[Any, Tensor](), one
    for j, leaf in enumerate(program.leaves):
        k = 1 if leaf.how == "mean" else 2
        own = [piece.tape.rows(program)[j][k:] for piece in pieces]
        values = draw((3, torch.Size(leaf.shape).numel()))
        values = values[:1].expand_as(values) if leaf.how == "same" else values
        if is_count[j]:
            counts = alike.setdefault(tuple(float(row[0]) for row in own), draw((3, 1)))
            weights = counts if j == base else weights
            columns.append(torch.cat([one, counts, values * counts] if k == 1 else [one, one, counts], 1))
        else:
            columns.append(torch.cat([one, one, values], 1))
    parts = [[column[i].double() for column in columns] for i in range(3)]
    with suppress(RuntimeError, IndexError):  # of a program that can't compute with any numbers
        values = torch.stack([program.value(part) for part in (*parts, program.merged(parts))]).double()
        return bool(torch.isclose(values[:3] @ weights.double()[:, 0] / weights.sum(), values[3], rtol=1e-4))
    return False


def _is_linear(program: Program, pieces: Sequence[Seen]) -> bool:
    """Whether the gradients by leaves are the same whatever these are, but for means over samples their share."""
    means = [leaf for leaf in program.leaves if leaf.grad and leaf.how == "mean"]
    if any(c in name for name, *_ in program.ops for c in _CLAMPS) or not all(
        _follows_samples(m, pieces) for m in means
    ):
        return False
    draw, own = partial(torch.randn, generator=torch.Generator()), pieces[0].tape.rows(program, torch.device("cpu"))
    found = list[Tensor]()
    with suppress(RuntimeError, IndexError):  # of a program that can't compute with any numbers
        for size in (1e-3, 1e-3, 1.0, 1.0, 1.0, 1e4, 1e4, 1e4):
            drawn = [torch.cat([row[:2], size * draw(len(row) - 2)]) for row in own]
            rows = [a if leaf.how == "same" else b for leaf, a, b in zip(program.leaves, own, drawn, strict=True)]
            found.append(torch.cat([one.flatten() for one in program.slopes(rows) if one is not None]))
        return all(torch.equal(found[0], slopes) for slopes in found)
    return False


def _follows_samples(leaf: Leaf, pieces: Sequence[Seen]) -> bool:
    """Whether a count is that of samples, times a constant, by what it is and not by chance; or alike in all parts."""
    if leaf.how == "same":
        return True
    found = [(piece.tape.by_site[leaf.site], piece.num) for piece in pieces if leaf.site in piece.tape.by_site]
    first = found[0][0]
    if leaf.how == "mean" and "nll_loss" in leaf.site[0]:  # one target per sample, of which none is ignored
        return all(entry.shapes[1:3] == [(num,), None] and entry.count == num for entry, num in found)
    is_python = isinstance(first.count, (int, float)) if leaf.how == "mean" else leaf.slot >= 0
    counts = [entry.count if leaf.how == "mean" else entry.args[leaf.slot] for entry, _ in found]
    is_fixed = is_python and not any(isinstance(one, Tensor) for one in counts) and not first.is_picked
    return is_fixed and all(n and abs(n * found[0][1] - counts[0] * num) < 1e-6 * n * num
                            for n, (_, num) in zip(counts, found, strict=True))  # fmt: skip


class Part:
    """The loss of one part of a batch.

    Args:
        loss: of shape (), before its backward pass.
        num: samples of the part; 0 counts nothing of it.
        tape: of the step.

    Attributes:
        rows: the leaves of the loss.
    """

    num_hooks: ClassVar[int] = 0
    """How many hooks all parts have registered on nodes of graphs; torch counts them with those of modules."""

    def __init__(self, loss: Tensor, plan: Plan, num: float, tape: Tape) -> None:
        assert plan.program is not None
        self.plan, self.program, self.loss, self.num = plan, plan.program, loss, num
        self.rows = [row if num else torch.zeros_like(row) for row in tape.rows(plan.program, loss.device)]
        self._numbers = tape.numbers(plan.program)
        self.handles: list[Any] = []
        """Hooks on the graph, which go with it."""

    @property
    def weight(self) -> Number:
        """What the whole loss counts by."""
        if self.plan.base is None:
            return self.num
        row = self.rows[self.plan.base]
        return row[1] if self.program.leaves[self.plan.base].how == "mean" else row[2]

    def scale_alone(self, share: float) -> None:
        """Do what `scale` does, for a plan that is linear, before the leaves of other parts are known."""
        rows = zip(self.program.leaves, self.rows, strict=True)
        alike = [torch.cat([row[:1], row[1:] / (share or 1)]) if leaf.how == "mean" else row for leaf, row in rows]
        self.scale(alike, share)

    def scale(self, merged: Sequence[Tensor], share: float) -> None:
        """Put the whole batch's gradients of the leaves in the place of the part's; call it before backward.

        Args:
            merged: the leaves of the whole batch.
            share: what the loss of this part is multiplied by in the whole batch's.
        """
        upstream, nodes = list[Tensor | None](), self._nodes()
        self._keep(self.loss.grad_fn, partial(_noted, upstream))
        for j, (leaf, slope) in enumerate(zip(self.program.leaves, self.program.slopes(merged), strict=True)):
            if slope is None or j not in nodes:
                continue
            own = slope * (share if leaf.how == "same" else 1.0)
            if leaf.how == "mean":
                by = self.rows[j][1]
                own = torch.where(by == 0, 0.0, slope * by / merged[j][1])
            self._keep(nodes[j], partial(_put, upstream, own, share, -1 - leaf.slot))

    def _keep(self, node: Any, hook: Any) -> None:
        self.handles.append(node.register_prehook(hook))
        Part.num_hooks += 1

    def _nodes(self) -> dict[int, Any]:
        """The nodes of the graph that have computed the leaves, found by torch's numbers of them."""
        found, seen, left, wanted = dict[int, Any](), set[Any](), [self.loss.grad_fn], set(self._numbers.values())
        while left and len(found) < len(wanted):
            node: Any = left.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node._sequence_nr() in wanted:
                found[node._sequence_nr()] = node
            elif "OverBatch" not in node.name():  # of several parts' graphs
                left += [child for child, _ in node.next_functions]
        return {j: found[number] for j, number in self._numbers.items() if number in found}


def _noted(upstream: list[Tensor | None], gradients: Gradients) -> None:
    upstream[:] = gradients[:1]


def _put(upstream: list[Tensor | None], gradient: Tensor, share: float, k: int, gradients: Gradients) -> Gradients:
    """The gradient of a leaf in the whole batch's loss, of which this part's is multiplied by its share."""
    (own,) = upstream
    assert own is not None
    found = gradient * own.to(gradient) / share if share else torch.zeros_like(gradient)
    return tuple(
        found.to(one.device, one.dtype).reshape(one.shape) if j == k and one is not None else one
        for j, one in enumerate(gradients)
    )


def ratio(own: Number, total: Number) -> Number:
    """A fraction; 0 of nothing."""
    if isinstance(own, Tensor) or isinstance(total, Tensor):
        like = total if isinstance(total, Tensor) else own
        assert isinstance(like, Tensor)
        whole, part = (torch.as_tensor(one, dtype=like.dtype, device=like.device) for one in (total, own))
        return torch.where(whole == 0, 0.0, part / whole)
    return own / total if total else 0.0
