"""Give the losses of parts of a batch the gradients that they have in the whole batch's loss.

A loss is computed by a program (`programs.py`) of numbers that reduce the batch, its leaves: L = f(l_1, ..., l_n). With
m_j leaf j of the whole batch, merged of those of the parts, the gradient that enters leaf j of part p is
df/dl_j(m) * w_pj, where w_pj is the part's fraction of a mean, 1 for a sum, its share for what all parts have alike.

    by samples    what parts of a mean over samples have: nothing is read in a step
    one weight    the whole loss counts by one leaf, as by a `loss_weight`
    all leaves    gradients are put in the place of those of the part's own loss, once the leaves of all parts are known

That a plan is right is not decided here but by gradients, in `step_comparison.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from .program_finder import ProgramFinder
from .programs import NUMBER, RETURNED, Leaf, Program
from .tape import Tape

Gradients: TypeAlias = tuple[Tensor | None, ...]

_CLAMPS = ("clamp", "maximum", "minimum", "max.other", "min.other")
"""Operations by which a number of the whole batch is another function of it than a part's."""
_SAMPLES = -1


@dataclass(frozen=True)
class Plan:
    """How the loss of a part is weighted.

    Args:
        program: of the loss; None for a mean over samples.
        base: the leaf by which the whole loss counts; None if the gradient of each leaf is put in its place.
    """

    program: Program | None = None
    base: int | None = None

    @property
    def is_of_samples(self) -> bool:
        """Whether the loss is a mean over samples, so that nothing need be read in a step."""
        return self.program is None

    @property
    def needs_all(self) -> bool:
        """Whether the gradients of leaves are put in their place, for which those of all parts must be known."""
        return self.program is not None and self.base is None


OF_SAMPLES = Plan()
"""The plan of a mean over samples."""


def proposals(seen: ProgramFinder) -> Iterator[Plan]:
    """Yield plans of the loss that a step returned, the cheapest first."""
    program = seen.program(RETURNED)
    if program is None:
        yield OF_SAMPLES
        return
    yield from (OF_SAMPLES if base == _SAMPLES else Plan(program, base) for base in _bases(program, seen))
    if not any(leaf.how in ("max", "min") for leaf in program.leaves):
        yield Plan(program)


def _bases(program: Program, seen: ProgramFinder) -> list[int]:
    """The leaves by which a loss is the mean of those of any parts, or by what they divide by; -1 for samples.

    Three parts are drawn. Counts that are the same in all pieces are the same in all batches.
    """
    if any(c in name for name, _ in program.ops for c in _CLAMPS):
        return []
    draw = partial(torch.randint, 1, 50, generator=torch.Generator(), dtype=torch.float64)
    one, samples = torch.ones(3, 1, dtype=torch.float64), draw((3, 1))
    weights, alike, columns = {_SAMPLES: samples}, dict[Any, Tensor](), list[Tensor]()
    for j, leaf in enumerate(program.leaves):
        values = draw((3, torch.Size(leaf.shape).numel()))
        k = 1 if leaf.how == "mean" else 2 if leaf.how == "sum" and not (leaf.grad or leaf.shape) else 0
        if k:
            counts = tuple(float(piece.tape.rows(program)[j][k:][0]) for piece in seen.pieces)
            drawn = samples * counts[0] if _follows_samples(leaf, seen) else alike.setdefault(counts, draw((3, 1)))
            weights |= {} if k == 1 and leaf.shape else {j: drawn}
            columns.append(torch.cat([one, drawn, values * drawn] if k == 1 else [one, one, drawn], 1))
        else:
            values = values[:1].expand_as(values) if leaf.how == "same" else values
            if leaf.site[1] == NUMBER and leaf.slot >= 0:  # what is as small as 1e-8 stays so
                values = values * (seen.whole.tape.value(leaf.site, leaf.slot) or 1.0)
            columns.append(torch.cat([one, one, values], 1))
    parts = [[column[i] for column in columns] for i in range(3)]
    with suppress(RuntimeError, IndexError):  # of a program that can't compute with any numbers
        values = torch.stack([program.value(rows) for rows in (*parts, program.merged(parts))])
        close, values = partial(torch.isclose, rtol=max(1e-4, 4 * torch.finfo(values.dtype).eps)), values.double()
        return [j for j, by in weights.items() if close(values[:3] @ by[:, 0] / by.sum(), values[3])]
    return []


def _follows_samples(leaf: Leaf, seen: ProgramFinder) -> bool:
    """Whether a count is that of samples, times a constant, by what it is and not by chance."""
    found = seen.entries(leaf.site)
    if leaf.how == "mean" and "nll_loss" in leaf.site[0]:  # one target per sample, of which none is ignored
        return all(entry.shapes[1:3] == [(num,), None] and entry.count == num for entry, num in found)
    counts = [entry.count if leaf.how == "mean" else entry.args[leaf.slot] for entry, _ in found]
    is_fixed = (leaf.how == "mean" or leaf.slot >= 0) and all(isinstance(one, (int, float)) for one in counts)
    return is_fixed and not found[0][0].picked > 0 and all(
        n and abs(n * found[0][1] - counts[0] * num) < 1e-6 * n * num
        for n, (_, num) in zip(counts, found, strict=True)
    )  # fmt: skip


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
        self.plan, self.loss, self.num = plan, loss, num
        self.program = program = plan.program or Program((), ())
        self.rows = [row if num else torch.zeros_like(row) for row in tape.rows(program, loss.device)]
        self._numbers = tape.numbers(program)
        self.handles: list[Any] = []
        """Hooks on the graph, which go with it."""

    @property
    def weight(self) -> Tensor | float:
        """What the whole loss counts by."""
        if self.plan.base is None:
            return self.num
        row = self.rows[self.plan.base]
        return row[1] if self.program.leaves[self.plan.base].how == "mean" else row[2]

    def guard(self) -> None:
        """Have no gradient enter the leaves of a part that counts nothing: what divides by 0 makes nan of a 0."""
        weight = torch.as_tensor(self.weight)
        if weight.is_cpu and weight != 0:  # elsewhere to ask would wait
            return
        for node in self._nodes().values():
            self._keep(node, partial(_none_without, weight))

    def scale(self, merged: Sequence[Tensor], share: float) -> None:
        """Put the whole batch's gradients of the leaves in the place of the part's; call it before backward.

        Args:
            merged: the leaves of the whole batch.
            share: what the loss of this part is multiplied by in the whole batch's.
        """
        upstream, nodes = list[Tensor | None](), self._nodes()
        self._keep(self.loss.grad_fn, partial(_noted, upstream))
        for j, slope in self.program.slopes(merged).items():
            leaf = self.program.leaves[j]
            if j not in nodes:
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
        found, wanted = dict[int, Any](), set(self._numbers.values())
        for node in graph(self.loss, wanted):
            if node._sequence_nr() in wanted:
                found[node._sequence_nr()] = node
                if len(found) == len(wanted):
                    break
        return {j: found[number] for j, number in self._numbers.items() if number in found}


def graph(loss: Tensor, ends: "set[int] | None" = None) -> Iterator[Any]:
    """Yield the nodes of a loss's graph, each once.

    Args:
        ends: numbers of nodes below which nothing matters; neither do graphs of several parts then.
    """
    seen, left = set[Any](), [loss.grad_fn]
    while left:
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if ends is None or not (node._sequence_nr() in ends or "OverBatch" in node.name()):
            left += [child for child, _ in node.next_functions]


def _noted(upstream: list[Tensor | None], gradients: Gradients) -> None:
    upstream[:] = gradients[:1]


def _none_without(weight: Tensor, gradients: Gradients) -> Gradients:
    return tuple(
        None if one is None else torch.where(weight.to(one.device) == 0, torch.zeros_like(one), one)
        for one in gradients
    )


def _put(upstream: list[Tensor | None], gradient: Tensor, share: float, k: int, gradients: Gradients) -> Gradients:
    """The gradient of a leaf in the whole batch's loss, of which this part's is multiplied by its share."""
    (own,) = upstream
    assert own is not None
    found = gradient * own.to(gradient) / share if share else torch.zeros_like(gradient)
    return tuple(
        found.to(one.device, one.dtype).reshape(one.shape) if j == k and one is not None else one
        for j, one in enumerate(gradients)
    )
