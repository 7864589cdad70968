"""Find how the values of a step on some samples follow from those of parts of these; see `programs.py`."""

import operator
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from ...core.module_log import NoValue
from .programs import NUMBER, RETURNED, Entry, Leaf, Program, Ref, Site, Tape, number_of, operation
from .verdict import OF_SAMPLES, Plan

_WEIGHED = [(f"aten.{name}.Tensor", NUMBER) for name in ("add", "sub", "rsub", "mul")]
"""Operations by numbers that may be others in each step, such as weights that are annealed."""
_SUMS = ("aten.sum", "aten.nansum", "aten.count_nonzero", "aten.bincount", "aten.histc", "aten.dot")
_CLAMPS = ("clamp", "maximum", "minimum", "max.other", "min.other")
"""Operations by which a number of the whole batch is another function of it than a part's."""
_SAMPLES = -1


@dataclass
class Seen:
    """A step on some samples: their number, and its tape."""

    num: int
    tape: Tape = field(default_factory=Tape)


class ProgramFinder:
    """How the values of a step on some samples follow from those of parts of these."""

    def __init__(self, whole: Seen, parts: Sequence[Seen]) -> None:
        self.whole, self.parts, self.pieces = whole, parts, (whole, *parts)
        self._leaves: list[Leaf] = []
        self._ops: list[Any] = []
        self._refs: dict[Ref, Ref] = {}
        self._kinds = list[str]()
        for entry in whole.tape.entries:
            self._kinds.append(self._kind(entry))

    def programs(self) -> tuple[dict[str, Program], list[str]]:
        """The programs of logged values that are no mean over samples, and the names of those that have none."""
        found, unknown = dict[str, Program](), list[str]()
        for name, value in self.whole.tape.logged.items():
            parts = [part.tape.logged[name] for part in self.parts if name in part.tape.logged]
            is_everywhere = name != RETURNED and number_of(value.kept) is not None and len(parts) == len(self.parts)
            if not is_everywhere or isinstance(parts[0].value, NoValue) or self._is_mean(name):  # or of a metric
                continue
            program = self.program(name)
            if program is None:
                unknown.append(name)
            else:
                found[name] = program
        return found, unknown

    def _is_mean(self, name: str) -> bool:
        """Whether a value is the mean of those of parts by samples, or by what was given as `batch_size`."""
        logged = [part.tape.logged[name] for part in self.parts]
        whole, values = self.whole.tape.logged[name].kept, [number_of(one.kept) for one in logged]
        tolerance = _tolerance(whole) * (1e-2 if _tolerance(whole) < 1e-8 else 1.0)  # a program is exact
        for weights in ([part.num for part in self.parts], [number_of(one.batch_size) for one in logged]):
            total = 0 if None in weights else sum(weights)
            mean = sum(map(operator.mul, values, weights)) / total if total else None
            if mean is not None and _near(mean, number_of(whole), values, tolerance):
                return True
        return False

    def program(self, name: str) -> Program | None:
        """The program of a value; None if there is none that makes the whole's of the parts'."""
        self._leaves, self._ops, self._refs = [], [], {}
        whole = self.whole.tape.logged.get(name)
        try:
            if whole is None or whole.ref is None:
                return None
            out = self._ref(whole.ref)
        except LookupError:
            return None
        program = Program(tuple(self._leaves), tuple(self._ops), out)
        rows = torch.stack([part.tape.rows(program, torch.device("cpu")) for part in self.parts])
        values = [number_of(part.tape.logged[name].kept) for part in self.parts]
        found = [float(program.value(own)) for own in (*rows, program.merged(rows))]
        fits = (
            _near(one, other, values, _tolerance(whole.kept))
            for one, other in zip(found, (*values, number_of(whole.kept)), strict=True)
        )
        return program if all(fits) else None

    def entries(self, site: Site) -> list[tuple[Entry, int]]:
        """What pieces have recorded at a place, and their samples, the whole first."""
        return [(entry, piece.num) for piece in self.pieces if (entry := piece.tape.by_site.get(site)) is not None]

    def _kind(self, entry: Entry) -> str:
        """Whether an operation reduces the batch (`leaf`), or comes after (`op`); else empty."""
        is_number = all(shape in ((), None) for shape in entry.result_shapes)
        by_data = torch.Tag.dynamic_output_shape in operation(entry.site[0]).tags  # as many as others by chance
        is_other = any(other.result_shapes != entry.result_shapes for other, _ in self.entries(entry.site))
        if is_other or (by_data and not is_number):
            return ""
        given = [arg for arg, shape in zip(entry.args, entry.shapes, strict=True) if shape is not None]
        if self._varies(entry):
            return "leaf"
        after = None not in given and any(isinstance(arg, Ref) and self._kinds[arg.op] for arg in given)
        return "op" if after else "leaf" if is_number else ""

    def _varies(self, entry: Entry) -> bool:
        """Whether the shapes of what an operation is given depend on the samples."""
        return any(other.shapes != entry.shapes for other, _ in self.entries(entry.site))

    def _ref(self, ref: Ref) -> Ref:
        if ref in self._refs:
            return self._refs[ref]
        entry, kind = self.whole.tape.entries[ref.op], self._kinds[ref.op]
        if kind == "leaf":
            self._refs[ref] = self._leaf(entry, -1 - ref.k)
        elif kind == "op":
            args, name = [self._arg(entry, i) for i in range(len(entry.args))], entry.site[0]
            if any(isinstance(arg, Ref) and shape is None for arg, shape in zip(args, entry.shapes, strict=True)):
                name = name.replace(".Scalar", ".Tensor")  # of a number that varies
            self._ops.append((name, tree_unflatten(args, entry.spec)))
            self._refs |= {Ref(ref.op, k): Ref(len(self._ops) - 1, k) for k in range(len(entry.results))}
        else:
            raise LookupError
        return self._refs[ref]

    def _arg(self, entry: Entry, i: int) -> Any:
        arg = entry.args[i]
        if isinstance(arg, Ref) and self._kinds[arg.op]:
            return self._ref(arg)
        is_number = type(arg) in (int, float)
        if is_number and i == 1 and entry.site[0].startswith("aten.div") and (by := self._item(entry)) is not None:
            return by
        varies = is_number and any(other.args[i] != arg for other, _ in self.entries(entry.site))
        may_vary = varies or (is_number and i < 2 and entry.site[:2] in _WEIGHED)
        return self._leaf(entry, i) if may_vary or entry.shapes[i] is not None else arg

    def _item(self, entry: Entry) -> Ref | None:
        """What a number has been before that divides: `count.item()`, or `max(1, count.item())`; the latest first."""
        numbers = [other.args[1] for other, _ in self.entries(entry.site)]
        before = takewhile(lambda other: other is not entry, self.whole.tape.entries)
        for item in reversed([one for one in before if one.site[0] == "aten._local_scalar_dense.default"]):
            counts = [number_of(piece.tape.value(item.site, 0)) for piece in self.pieces]
            is_known = isinstance(item.args[0], Ref) and bool(self._kinds[item.args[0].op])
            if not is_known or None in counts or len(counts) != len(numbers):
                continue
            bounds = {number for number, count in zip(numbers, counts, strict=True) if number != count}
            if len(bounds) < 2 and numbers == [max(count, *bounds) if bounds else count for count in counts]:
                count = self._ref(item.args[0])
                if not bounds:
                    return count
                self._ops.append(("aten.clamp.default", ([count, *bounds], {})))
                return Ref(len(self._ops) - 1, 0)
        return None

    def _leaf(self, entry: Entry, slot: int) -> Ref:
        value = self.whole.tape.value(entry.site, slot)
        if value is None:
            raise LookupError
        result, dtype = entry.results[0], torch.float64 if isinstance(value, float) else None
        if isinstance(value, float) and entry.site[1] == NUMBER and isinstance(result, Tensor):
            dtype = result.dtype  # a count and a float make what torch's default is
        number = torch.as_tensor(value, dtype=dtype)
        grad = slot < 0 and entry.has_grad and number.is_floating_point()
        counted = entry.count is not None and slot == -1
        # a sum of what has no rows, such as a penalty on weights, is the batch's own, also where it is 0 in all parts
        sums = entry.site[0].startswith(_SUMS) and slot < 0 and self._varies(entry)
        first = "mean" if counted else "sum" if sums else "same"
        for how in dict.fromkeys([first, "same", "sum", "max", "min"]):
            leaf = Leaf(entry.site, slot, how, tuple(number.shape), number.dtype, grad)
            if self._merges(leaf, number):
                self._leaves.append(leaf)
                return Ref(-1, len(self._leaves) - 1)
        raise LookupError

    def _merges(self, leaf: Leaf, wanted: Tensor) -> bool:
        """Whether the whole's leaf is that of the parts, merged."""
        tolerance, program = _tolerance(wanted) if wanted.is_floating_point() else 1e-9, Program((leaf,))
        rows = torch.stack([part.tape.rows(program, torch.device("cpu")) for part in self.parts])
        found = [leaf.merged(rows), *(rows[rows[:, 0] > 0] if leaf.how == "same" else ())]
        close = partial(torch.isclose, rtol=tolerance, atol=tolerance * float(rows.nan_to_num()[:, 2:].abs().max()))
        return all(close(leaf.read(row).double(), wanted.double().cpu(), equal_nan=True).all() for row in found)


def _tolerance(value: Any) -> float:
    return 1e-9 if isinstance(value, Tensor) and value.dtype is torch.float64 else 1e-4


def _near(one: float, other: float, parts: Sequence[float], tolerance: float) -> bool:
    if other != other or one != one:  # nan
        return one != one and other != other
    return abs(one - other) <= tolerance * max(1e-12, *(abs(part) for part in (other, *parts) if part == part))


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
    samples, one, alike, rows = draw((3, 1)), torch.ones(3, 1, dtype=torch.float64), dict[Any, Tensor](), list[Tensor]()
    weights = {_SAMPLES: samples}
    for j, leaf in enumerate(program.leaves):
        values, by = draw((3, leaf.size - 2)), one
        if leaf.how == "mean" or (leaf.how == "sum" and not (leaf.grad or leaf.shape)):
            place = 1 if leaf.how == "mean" else 2
            counts = tuple(float(piece.tape.rows(Program((leaf,)))[place]) for piece in seen.pieces)
            drawn = samples * counts[0] if _follows_samples(leaf, seen) else alike.setdefault(counts, draw((3, 1)))
            if leaf.how == "sum":
                weights[j] = values = drawn
            else:
                by, values = drawn, values * drawn
                weights |= {} if leaf.shape else {j: drawn}
        else:
            values = values[:1].expand_as(values) if leaf.how == "same" else values
            if leaf.site[1] == NUMBER and leaf.slot >= 0:  # what is as small as 1e-8 stays so
                values = values * (seen.whole.tape.value(leaf.site, leaf.slot) or 1.0)
        rows.append(torch.cat([one, by, values], 1))
    parts = torch.cat(rows, 1)
    with suppress(RuntimeError, IndexError):  # of a program that can't compute with any numbers
        values = torch.stack([program.value(row) for row in (*parts, program.merged(parts))])
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
