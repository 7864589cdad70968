"""Find what the terms of a loss divide by, so that parts of a batch train exactly as the whole batch.

A loss is a sum of terms, each a mean over samples, elements, counted targets, weights of classes or a mask. With d_pj
what term j divides by in part p and D_j = sum over p of d_pj, the gradient that enters term j is scaled by d_pj / D_j.

    loss ← sums, constant factors ← terms ← what the model computes
            a plan says where            ↑ the number is read here, and the gradient scaled

`probe` makes the plan once, from losses of parts of different sizes, whose graphs it walks in lock-step down to where
the batch is reduced: what varies among the divisors on the way is the normaliser. `Part` follows the plan in a step.
That a plan is right is not decided here but by gradients, in `verifier.py`.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...core.devices import precise_dtype
from ...core.internals import saved
from ..losses import address

Number: TypeAlias = Tensor | float

_TO_THE_END = -1
_FUSED = {
    "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "KlDiv",
    "SoftMarginLoss", "MultiMarginLoss", "MultilabelMarginLoss",
}  # fmt: skip
_NLL = ("NllLoss", "NllLoss2D")
_LINEAR = {
    "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Expand", "Permute", "Transpose", "T", "Clone",
    "Copy", "CopySlices", "ToCopy", "Alias", "Select", "Slice", "Stack", "Cat", "Unbind", "Split", "Index",
    "IndexSelect", "MaskedSelect", "MaskedFill", "Where", "Gather", "Add", "Sub", "Rsub", "Neg", "Sum", "Nansum",
    "AsStrided", "CopyBackwards", "Mul", "Div", "Mean", "_DDPSink", "RegisterPostBackwardFunction",
}  # fmt: skip
"""Operations of which sums go through."""
_CLAMPS = {"clamp", "clamp_", "clamp_min", "clip", "maximum", "max"}
_CONTRACTIONS = {"Dot", "Mv", "Mm", "Bmm"}
_PICKS = {"Index", "MaskedSelect"}
"""Operations whose result has as many rows as the data say."""
_MEAN = 1
"""The code of `reduction="mean"`."""
_MOST_NODES = 3000
_SAVED_INPUTS = ("self", "other", "mat1", "indices")


class Unfit(Exception):  # no error of anybody's: the loss is of another form
    """The graph of a loss does not have the form that is looked for; says why."""


@dataclass(frozen=True)
class Term:
    """A term of a loss.

    Args:
        kind: `mean`, divided by what varies with the batch; `sum`, divided by nothing that does; `once`, which does not
            depend on samples (but may be divided with what does, as in `(errors + penalty) / len(x)`).
        path: indices of inputs from the loss down to the term.
        names: of the nodes on the path, that of the loss first.
        factors: (depth of the node on the path, how its divisor is read) of all divisors that vary.
        edge: depth of the node whose incoming gradient is scaled; 0 for the loss itself.
        group: terms of one group have one normaliser; 0 for that of samples.
    """

    kind: Literal["mean", "sum", "once"]
    path: tuple[int, ...]
    names: tuple[str, ...]
    factors: tuple[tuple[int, str], ...] = ()
    edge: int = 0
    group: int = 0

    @property
    def last(self) -> int:
        """Depth of the last node that must be as it was."""
        return max(self.edge, self.factors[-1][0] if self.factors else 0)


@dataclass(frozen=True)
class Plan:
    """How the terms of a loss are found in each step.

    Args:
        base: the group by whose normaliser whole losses are weighted, as far as that is right.
        clamps: whether a divisor was clamped, so that what it was before must be recorded in the step.
    """

    terms: tuple[Term, ...]
    base: int = 0
    clamps: bool = False

    @cached_property
    def is_of_samples(self) -> bool:
        """Whether the loss is a mean over samples, so that nothing need be read in a step."""
        return not self.base and not self.others

    def is_other(self, term: Term) -> bool:
        """Whether the weight of the whole loss is wrong for a term."""
        if term.kind == "once":
            return bool(term.factors)
        return term.kind != "mean" or term.group != self.base

    @cached_property
    def others(self) -> tuple[Term, ...]:
        """The terms for which the weight of the whole loss is wrong."""
        return tuple(filter(self.is_other, self.terms))

    @cached_property
    def groups(self) -> list[int]:
        """The groups whose normalisers are read."""
        return sorted({term.group for term in self.terms if term.kind == "mean" and term.group})


OF_SAMPLES = Plan(())
"""The plan of a mean over samples."""


class Part:
    """The terms of the loss of one part of a batch.

    Args:
        loss: of shape (), before its backward pass.
        num: samples of the part.
        recorder: of the step, if the plan asks for it.

    Attributes:
        own_loss: as the module computed it.
        loss: the same graph; once scaled, its value is such that the shares of all parts add up to the whole batch's.
        normalisers: by group, before they were clamped; that of group 0 is the number of samples.

    Raises:
        Unfit: the graph is another one.
    """

    num_hooks: ClassVar[int] = 0
    """How many hooks all parts have registered on nodes of graphs; torch counts them with those of modules."""

    def __init__(self, loss: Tensor, plan: Plan, num: float, recorder: "Recorder | None" = None) -> None:
        self.plan, self.own_loss, self.loss = plan, loss, loss
        clamped = recorder.clamped if recorder is not None and plan.clamps else {}
        self._values = recorder.values if recorder is not None and plan.others else {}
        self.normalisers: dict[int, Number] = {0: float(num)}
        self._divisors: dict[int, Number] = {}
        self.handles: list[Any] = []
        """Hooks on the graph, which go with it."""
        self._edges: list[tuple[Term, list[Any]]] = []
        for term, nodes in _found_terms(loss, plan):
            if term.kind == "mean" and term.group:
                own = _normaliser(nodes, term, float(num), {})
                self._divisors[term.group] = own
                before = _normaliser(nodes, term, float(num), clamped) if clamped else own
                self.normalisers.setdefault(term.group, before)
                if isinstance(own, Tensor):
                    self._keep(nodes[term.factors[-1][0]].register_hook(partial(_masked, own != 0)))
            self._edges.append((term, nodes))
        for group in plan.groups:  # a condition on the data may have left out a term
            self.normalisers.setdefault(group, 0.0)

    def _keep(self, handle: Any) -> None:
        self.handles.append(handle)
        Part.num_hooks += 1

    def scale(self, totals: Mapping[int, Number], share: Number) -> None:
        """Scale the gradients of terms for which the share of the whole loss is wrong; call it before backward.

        Args:
            totals: the sums of `normalisers` over all parts.
            share: what the loss of this part is multiplied by in the whole batch's.
        """
        if self._values:
            self.loss = self._valued(totals, share)
        done = set[tuple[Any, int]]()
        for term, nodes in self._edges:
            if not self.plan.is_other(term):
                continue
            key = (nodes[0], _TO_THE_END) if not term.edge else (nodes[term.edge - 1], term.path[term.edge - 1])
            if key in done:
                continue
            done.add(key)
            factor = self._factor(term, totals, share)
            if not term.edge:
                self._keep(nodes[0].register_prehook(partial(_scaled, factor)))
            else:
                scaled = partial(_scaled_input, factor, term.path[term.edge - 1])
                self._keep(nodes[term.edge - 1].register_hook(scaled))

    def _factor(self, term: Term, totals: Mapping[int, Number], share: Number) -> Number:
        """What a term must be multiplied by beside the share of the whole loss."""
        if term.kind == "once":  # each part has divided it by its own number
            return share
        return ratio(1.0 if term.kind != "mean" else self._fraction(term.group, totals), share)

    def _valued(self, totals: Mapping[int, Number], share: Number) -> Tensor:
        """The loss with a value that its share makes part of the whole batch's loss, as far as values are known."""
        kept = dict[Any, tuple[Tensor, Any]]()
        for term, nodes in self._edges:
            for depth in range(min(term.edge, len(nodes) - 1), -1, -1):
                under = {
                    (other.kind, other.group) for other, _ in self._edges if other.path[:depth] == term.path[:depth]
                }
                if nodes[depth] in self._values and under == {(term.kind, term.group)}:
                    value = self._values[nodes[depth]]
                    factor = self._factor(term, totals, share) if self.plan.is_other(term) else 1.0
                    kept[nodes[depth]] = value, factor
                    break
        values = [value for value, _ in kept.values()]
        slopes: Any = torch.autograd.grad(self.loss, values, retain_graph=True, allow_unused=True) if values else ()
        total, rest = torch.zeros_like(self.loss), self.loss.detach()
        for slope, (value, factor) in zip(slopes, kept.values(), strict=True):
            if slope is None or (isinstance(factor, Tensor) and factor.dim()):  # one of each class
                continue
            own = value.detach() * slope
            rest = rest - own
            factor = torch.as_tensor(_like(factor, own), dtype=own.dtype)
            total = total + torch.where(factor == 0, 0.0, own * factor)  # of nothing, it is nan
        return _Valued.apply(self.loss, total + torch.where(rest.isnan(), 0.0, rest))

    def _fraction(self, group: int, totals: Mapping[int, Number]) -> Number:
        """What a term of this part counts for in the whole batch's."""
        own, total = self._divisors.get(group, self.normalisers[group]), totals[group]
        if self.plan.clamps:  # a sum that is less than the bound would be clamped, too
            own, total = torch.as_tensor(own), torch.as_tensor(total)
            before = torch.as_tensor(self.normalisers[group])
            total = torch.where(own > before, torch.maximum(total.to(own), own), total.to(own))
        return ratio(own, total)


class _Valued(torch.autograd.Function):
    """A loss of another value, with its own gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Recorder(TorchFunctionMode):
    """Records numbers that a step computes, inside the block.

    Attributes:
        clamped: what was clamped (`mask.sum().clamp(min=1)`), by the address of the result. Where nothing counts in a
            part, the sum over all parts is clamped, and not the part's.
        values: numbers with a graph, by their nodes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clamped: dict[int, Tensor] = {}
        self.values: dict[Any, Tensor] = {}
        self._kept: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation, and record its result if it is a number."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result.dim():
            if result.grad_fn is not None:
                self.values[result.grad_fn] = result
            elif args and isinstance(args[0], Tensor) and getattr(func, "__name__", "") in _CLAMPS:
                self.clamped[address(result)] = args[0].detach()
                self._kept.append(result)  # its address is not used again
        return result


def probe(losses: Sequence[Tensor], samples: Sequence[int], clamped: Mapping[int, Tensor], guess: "Guess") -> Plan:
    """Make a plan from losses of parts of different sizes, taken from one batch.

    Args:
        losses: at least two, with their graphs.
        samples: of each.
        clamped: numbers before they were clamped, see `Recorder`.
        guess: what is assumed where graphs don't tell.

    Raises:
        Unfit: the loss is no sum of such terms; says which operation is in the way.
    """
    walk = _Walk(guess)
    try:
        walk.down(tuple(loss.grad_fn for loss in losses), (), (), (), None)
    except Unfit:  # a condition on the data may have left out terms of some
        most = max(map(_num_leaves, losses))
        full = [i for i, loss in enumerate(losses) if _num_leaves(loss) == most]
        samples = [samples[i] for i in full]
        if len(full) == len(losses) or len(set(samples)) < 2:
            raise
        walk = _Walk(guess)
        walk.down(tuple(losses[i].grad_fn for i in full), (), (), (), None)
    terms, vectors, unlike_loss = list[Term](), list[tuple[float, ...]](), set[int]()
    clamps = False
    for term, nodes, is_fixed in walk.terms:
        group = 0
        if term.kind == "mean":
            read = [_normaliser(own, term, float(n), clamped) for own, n in zip(nodes, samples, strict=True)]
            vector = tuple(one for value in read for one in torch.as_tensor(value).double().flatten().tolist())
            by_tensors = [divisor(nodes[0][depth]) for depth, how in term.factors if how == "divisor"]
            is_clamped = any(isinstance(value, Tensor) and address(value) in clamped for value in by_tensors)
            clamps |= is_clamped
            group = _group(vector, samples, vectors, is_fixed and len(vector) == len(samples))
            if is_clamped or len(vector) > len(samples):  # a number of each class
                unlike_loss.add(group)
        terms.append(replace(term, group=group))
    found = tuple(terms)
    groups = {term.group for term in found if term.kind == "mean"}
    only = all(term.kind in ("mean", "once") for term in found) and len(groups) == 1 and not groups & unlike_loss
    return Plan(found, groups.pop() if only else 0, clamps)


@dataclass(frozen=True)
class Guess:
    """What is assumed where graphs don't tell; gradients decide whether it is right.

    Args:
        products: the numbers, counted along the walk, of products with a number that varies which are divisions.
        opaque: what a function that hides its graph divides by: `samples`, nothing (`sum`), what it has saved as its
            i-th tensor (`saved i`), or what its only input does (`through`); empty to give up.
        splits: whether what does not depend on samples is a term of its own in a sum that is divided as a whole.
    """

    products: tuple[int, ...] = ()
    opaque: str = ""
    splits: bool = False


def guesses() -> Iterator[Guess]:
    """Yield what may be assumed, the likeliest first."""
    products = ((), (0,), (1,), (0, 1))
    yield from map(Guess, products)
    yield Guess(splits=True)
    for opaque in ("through", "samples", "sum", *(f"saved {i}" for i in range(8))):
        yield Guess((), opaque)


class _Walk:
    """Walks the graphs of several losses in lock-step, from the losses down to what reduces their batches."""

    def __init__(self, guess: Guess) -> None:
        self._guess = guess
        self._num_products = 0
        self.terms: list[tuple[Term, list[list[Any]], bool]] = []
        self._above: list[tuple[Any, ...]] = []

    def down(
        self, nodes: tuple[Any, ...], path: tuple[int, ...], names: tuple[str, ...],
        factors: tuple[tuple[int, str], ...], ceiling: int | None,
    ) -> None:  # fmt: skip
        """Walk on from one node of each graph."""
        self._above.append(nodes)
        try:
            self._look(nodes, path, names, factors, ceiling)
        finally:
            self._above.pop()

    def _found(self, kind: Any, path: Any, names: Any, factors: Any, ceiling: int | None, fixed: bool = True) -> None:
        deepest = factors[-1][0] if factors and kind != "once" else len(path)
        edge = deepest if ceiling is None else min(deepest, ceiling)
        parts = [list(own) for own in zip(*self._above, strict=True)]
        self.terms.append((Term(kind, path, names, factors, edge), parts, fixed))

    def _look(self, nodes: tuple[Any, ...], path: Any, names: Any, factors: Any, ceiling: int | None) -> None:
        depth, kinds = len(path), {kind_of(node) for node in nodes}
        if len(kinds) > 1:
            if factors:
                return self._found("mean", path, (*names, "*"), factors, ceiling, fixed=False)
            raise Unfit(" or ".join(sorted(kinds)))
        kind = kinds.pop()
        names = (*names, kind)
        first = nodes[0]
        if kind == "OverBatch":  # counts by samples
            return self._found("mean", path, names, (*factors, (depth, "samples")), ceiling)
        if kind == "EvenerMean":
            return self._found("mean", path, names, (*factors, (depth, "given")), ceiling, fixed=False)
        varies_after = len({_shape(node) for node in nodes}) > 1
        if hasattr(first, "saved_tensors") and not varies_after and kind not in _LINEAR:
            return self._opaque(nodes, path, names, factors, ceiling)
        if is_without_batch(nodes):
            return self._found("once", path, names, factors, ceiling)
        if varies_after:  # one value per sample: what was above has reduced it
            return self._found("mean" if factors else "sum", path, names, factors, ceiling)
        own = [divisor(node) for node in nodes]
        if own[0] is not None and any(not _same(own[0], other) for other in own):
            factors = (*factors, (depth, "divisor"))
        inputs = [_inputs(node) for node in nodes]
        if kind == "Mul" and len(inputs[0]) == 1:
            numbers = [torch.as_tensor(_other(node)) for node in nodes]
            if numbers[0].numel() == 1 and any(not _same(numbers[0], number) for number in numbers):
                if self._num_products in self._guess.products:
                    factors = (*factors, (depth, "factor"))
                self._num_products += 1
        reduces = kind == "Mean" and any(_sizes(node) != _sizes(first) for node in nodes)
        if kind in _NLL or kind in _FUSED or reduces:
            return self._found("mean" if factors else "sum", path, names, factors, ceiling, _is_fixed(nodes, kind))
        if kind in ("Mul", "Div") and len(inputs[0]) == 2:
            without = [is_without_batch(tuple(own[j][1] for own in inputs)) for j in (0, 1)]
            if without == [False, False] or (kind == "Div" and without == [True, False]):
                raise Unfit(kind)
            i = inputs[0][without.index(False)][0]
            ceiling = depth if ceiling is None else ceiling
            return self.down(tuple(n.next_functions[i][0] for n in nodes), (*path, i), names, factors, ceiling)
        if not (kind in _LINEAR or (kind in _CONTRACTIONS and len(inputs[0]) == 1)):
            raise Unfit(kind)
        unlike = any(len(own) != len(inputs[0]) for own in inputs)
        if unlike or (factors and len(inputs[0]) > 1):  # the normaliser above is theirs
            if self._guess.splits:
                self._split(nodes, path, names[:-1], factors, ceiling)
            return self._found("mean" if factors else "sum", path, names, factors, ceiling, _is_fixed(nodes, kind))
        for j, (i, _) in enumerate(inputs[0]):
            self.down(tuple(own[j][1] for own in inputs), (*path, i), names, factors, ceiling)
        return None

    def _split(self, nodes: tuple[Any, ...], path: Any, names: Any, factors: Any, ceiling: int | None) -> None:
        """Find the terms of a divided sum that don't depend on samples."""
        if is_without_batch(nodes):
            return self.down(nodes, path, names, factors, ceiling)
        kinds = {kind_of(node) for node in nodes}
        if kinds <= {"Add"} or kinds <= {"Sub"}:
            for i in (0, 1):
                children = tuple(n.next_functions[i][0] if i < len(n.next_functions) else None for n in nodes)
                if None not in children:
                    below = self._above and self._above[-1] is not nodes
                    if below:
                        self._above.append(nodes)
                    self._split(children, (*path, i), (*names, *kinds), factors, ceiling)
                    if below:
                        self._above.pop()
        return None

    def _opaque(self, nodes: Any, path: Any, names: Any, factors: Any, ceiling: int | None) -> None:
        """A function written in Python, or a compiled one, that reduces the batch itself."""
        guess, inputs = self._guess.opaque, _inputs(nodes[0])
        if guess == "through" and len(inputs) == 1 and _shape(inputs[0][1]) == _shape(nodes[0]):
            i = inputs[0][0]
            return self.down(tuple(n.next_functions[i][0] for n in nodes), (*path, i), names, factors, ceiling)
        if guess in ("", "through"):
            raise Unfit(names[-1])
        if guess == "sum":
            return self._found("mean" if factors else "sum", path, names, factors, ceiling)
        if guess.startswith("saved"):
            i = int(guess.split()[1])
            if any(i >= len(n.saved_tensors) or n.saved_tensors[i].numel() != 1 for n in nodes):
                raise Unfit(names[-1])
        return self._found("mean", path, names, (*factors, (len(path), guess)), ceiling, fixed=guess == "samples")


def _num_leaves(loss: Tensor) -> int:
    """How many terms a loss has, as far as sums show."""
    num, left = 0, [loss.grad_fn]
    while left:
        node = left.pop()
        goes_on = kind_of(node) in ("Add", "Sub", "Neg", "Mul", "Div")
        num += not goes_on
        left += [child for _, child in _inputs(node)] if goes_on else []
    return num


def is_without_batch(nodes: tuple[Any, ...]) -> bool:
    """Whether nothing under these nodes changes with the number of samples."""
    seen, left = set[tuple[Any, ...]](), [nodes]
    while left:
        same = left.pop()
        if same in seen:
            continue
        seen.add(same)
        kind = kind_of(same[0])
        if len(seen) > _MOST_NODES or kind == "Embedding":
            return False
        if any(kind_of(node) != kind or _shape(node) != _shape(same[0]) for node in same):
            return False
        if len({_sizes(node) for node in same}) > 1 or _saved_shapes_vary(same):
            return False
        inputs = [[child for child, _ in node.next_functions] for node in same]
        if len({len(own) for own in inputs}) > 1:
            return False
        for children in zip(*inputs, strict=True):
            if any((child is None) != (children[0] is None) for child in children):
                return False
            if children[0] is not None:
                left.append(children)
    return True


def _saved_shapes_vary(nodes: tuple[Any, ...]) -> bool:
    for name in _SAVED_INPUTS:
        try:
            values = [value for node in nodes if (value := saved(node, name, None)) is not None]
        except RuntimeError:  # freed
            continue
        if values and isinstance(values[0], Tensor) and len({value.shape for value in values}) > 1:
            return True
    return False


def kind_of(node: Any) -> str:
    """The name of a node's operation, without number."""
    return re.sub(r"(Backward)?\d*$", "", node.name().split("::")[-1])


def divisor(node: Any) -> Number | None:
    """What a node itself divides by; None for nothing."""
    kind = kind_of(node)
    if kind in _NLL:
        return saved(node, "total_weight") if saved(node, "reduction") == _MEAN else None
    if kind in _FUSED:
        return float(saved(node, "self").numel()) if saved(node, "reduction") == _MEAN else None
    if kind == "Mean":
        sizes, dims = _sizes(node), saved(node, "dim", None)
        return float(math.prod(sizes[_signed(dim)] for dim in dims) if dims else math.prod(sizes))
    if kind == "Div":
        return _other(node)
    return None


def _other(node: Any) -> Any:
    """The factor without a gradient of a product or quotient; None if both have one."""
    inputs = node.next_functions
    if len(inputs) == 1 or inputs[1][0] is None:
        return saved(node, "other")
    return saved(node, "self") if inputs[0][0] is None and kind_of(node) == "Mul" else None


def _normaliser(nodes: Sequence[Any], term: Term, num: float, clamped: Mapping[int, Tensor]) -> Number:
    """What a term divides by in one part."""
    product: Number = 1.0
    for depth, how in term.factors:
        product = _factor(nodes[depth], how, num, clamped) * product
    return product


def _factor(node: Any, how: str, num: float, clamped: Mapping[int, Tensor]) -> Number:
    if how == "samples":
        return num
    if how == "given":
        value: Any = node.normaliser
    elif how == "factor":
        value = 1 / _other(node)
    else:
        value = divisor(node) if how == "divisor" else node.saved_tensors[int(how.split()[1])]
    if not isinstance(value, Tensor):
        return float(value)
    value = clamped.get(address(value), value) if clamped else value
    if value.is_cpu and value.numel() == 1:  # of a Python number: a tensor whose sums would be in the default dtype
        return torch.tensor(value.item(), dtype=torch.float64)
    return value.detach().to(precise_dtype(value.device))


def _followed(loss: Tensor, term: Term) -> list[Any] | None:
    """The nodes of a term in the graph of a loss; None if it is not there.

    Raises:
        Unfit: another term is in its place.
    """
    return None if loss.grad_fn is None else _followed_from(loss.grad_fn, term, 0)


def _followed_from(node: Any, term: Term, start: int) -> list[Any] | None:
    """The same from the node at a depth of the term's path."""
    nodes = [node]
    if kind_of(node) != term.names[start]:
        raise Unfit(f"{kind_of(node)} in place of {term.names[start]}")
    for i, name in zip(term.path[start : term.last], term.names[start + 1 :], strict=False):
        node = node.next_functions[i][0] if i < len(node.next_functions) else None
        if node is None:
            return None
        if kind_of(node) != name:
            raise Unfit(f"{kind_of(node)} in place of {name}")
        nodes.append(node)
    return nodes


def _found_terms(loss: Tensor, plan: Plan) -> list[tuple[Term, list[Any]]]:
    """The terms that are read, with their nodes in the graph of a loss; without those that are not there.

    Raises:
        Unfit: the loss has a term that the plan has not.
    """
    # those by samples are weighted with the whole loss
    terms = plan.terms if plan.others else [t for t in plan.terms if t.kind == "mean" and t.group == plan.base]
    try:
        found = [(term, _followed(loss, term)) for term in terms]
        return [(term, nodes) for term, nodes in found if nodes is not None]
    except Unfit:
        return list(_searched(loss, plan))


def _searched(loss: Tensor, plan: Plan) -> Iterator[tuple[Term, list[Any]]]:
    """Search the terms of a plan in a graph that a condition on the data has made another one."""
    left, open_nodes = list(plan.terms), [((), [loss.grad_fn])]
    while open_nodes:
        path, above = open_nodes.pop()
        kind = kind_of(above[-1])
        for term in left:
            start = min(term.edge, term.factors[0][0] if term.factors else term.edge)
            by, rest = len(path) - start, above[-1]
            nodes = above[:-1]
            try:
                nodes = [*nodes, *(_followed_from(rest, term, start) or [])]
            except Unfit:
                continue
            if len(nodes) < len(above):
                continue
            left.remove(term)
            factors = tuple((depth + by, how) for depth, how in term.factors)
            names = (*map(kind_of, above[:-1]), *term.names[start:])
            yield (
                replace(term, path=(*path, *term.path[start:]), names=names, factors=factors, edge=term.edge + by),
                nodes,
            )
            break
        else:
            if kind not in _LINEAR or kind in ("Mean", "Sum", "Nansum") or not _inputs(above[-1]):
                if all(term.kind != "once" for term in left):
                    raise Unfit(kind)
                continue
            open_nodes += [((*path, i), [*above, child]) for i, child in reversed(_inputs(above[-1]))]


def _group(vector: tuple[float, ...], samples: Sequence[int], known: list[tuple[float, ...]], fixed: bool) -> int:
    """The group of a normaliser, of its values in parts: 0 for samples, else one that has had just these."""
    by_chance = len(vector) == len(samples) and _proportional(vector, samples)
    if fixed and by_chance:
        return 0
    for number, other in enumerate(known, 1):
        if not by_chance and len(vector) == len(other) and all(map(_close, vector, other)):
            return number
    known.append(vector)
    return len(known)


def _proportional(vector: Sequence[float], samples: Sequence[float]) -> bool:
    ratio = vector[0] / samples[0]
    return ratio != 0 and all(_close(a, ratio * b) for a, b in zip(vector, samples, strict=True))


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6)


def _is_fixed(nodes: Sequence[Any], kind: str) -> bool:
    """Whether a mean is over elements whose number follows from that of samples, in all batches alike.

    One target per sample of which none is ignored counts so, too.
    """
    if kind in _NLL:
        targets = saved(nodes[0], "target")
        return (
            saved(nodes[0], "weight") is None
            and kind == "NllLoss"
            and targets.numel() == len(targets)
            and all(_same(saved(node, "total_weight"), float(saved(node, "target").numel())) for node in nodes)
        )
    left, seen = [(nodes[0], 0)], 0
    while left and seen < 50:
        node, depth = left.pop()
        seen += 1
        if kind_of(node) in _PICKS:
            return False
        if depth < 6:
            left += [(child, depth + 1) for _, child in _inputs(node)]
    return True


def _inputs(node: Any) -> list[tuple[int, Any]]:
    return [(i, child) for i, (child, _) in enumerate(node.next_functions) if child is not None]


def _shape(node: Any) -> tuple[tuple[int, ...], ...]:
    try:
        return tuple(tuple(int(size) for size in one.shape) for one in node._input_metadata)
    except Exception:  # noqa: BLE001  # nested tensors, or a node that keeps no metadata
        return ((-1,),)


def _sizes(node: Any) -> tuple[int, ...]:
    return tuple(saved(node, "self_sym_sizes", ()))


def _signed(dim: int) -> int:
    return dim if dim < 2**62 else dim - 2**64


def _same(a: Any, b: Any) -> bool:
    one, two = torch.as_tensor(a), torch.as_tensor(b)
    return one.shape == two.shape and bool(torch.allclose(one.double(), two.double(), rtol=1e-12, atol=0))


def ratio(own: Number, total: Number) -> Number:
    """A fraction; 0 of nothing."""
    if isinstance(own, Tensor) or isinstance(total, Tensor):
        like = total if isinstance(total, Tensor) else own
        assert isinstance(like, Tensor)
        whole = torch.as_tensor(total, dtype=like.dtype, device=like.device)
        part = torch.as_tensor(own, dtype=like.dtype, device=like.device)
        return torch.where(whole == 0, 0.0, part / whole)
    return own / total if total else 0.0


def _scaled(factor: Number, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else gradient * _like(factor, gradient) for gradient in gradients)


def _scaled_input(factor: Number, i: int, gradients: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
    return tuple(
        gradient * _like(factor, gradient) if j == i and gradient is not None else gradient
        for j, gradient in enumerate(gradients)
    )


def _masked(counts: Tensor, gradients: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
    """The gradients of a mean; 0 in place of 0 / 0 where it is over nothing."""
    return tuple(None if gradient is None else torch.where(counts, gradient, 0.0) for gradient in gradients)


def _like(factor: Number, gradient: Tensor) -> Any:
    return factor.to(gradient.device, gradient.dtype) if isinstance(factor, Tensor) else factor
