"""Find how losses and logged values follow from sums over the samples of a batch: parts of it make one device's values.

A value is computed of numbers that reduce the batch (sums, means, counts, maxima: leaves), and of
these by further operations, whatever they are (`errors.sum() / mask.sum().clamp(min=1)`, `mean.exp()`). Leaves of the
whole batch follow from those of its parts: they add up, with what they are divided by. What comes after is repeated.

    probe      a few samples, whole and in parts: all operations are recorded → a `Program` of each value that needs one
    each step  the leaves of the programs are recorded, found again by the lines of the code that compute them
    in the end leaves of all parts, merged → the program → the value of the whole batch

A part whose own value is not what the program makes of its own leaves (other operations ran) has it by samples.
"""

import operator
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from itertools import product
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from typing_extensions import override

from ...core.devices import precise_dtype
from ...core.module_log import lightning_modules, module_log, received
from ...core.no_value import NoValue

Site = tuple[Any, ...]
"""An operation's name, the lines of code that called it, and how many such calls were before it in the step."""

RETURNED = "the loss"
"""Stands for the name of the loss that a training step returns, which need not be logged."""

_CPU = torch.device("cpu")
_MOST_ELEMENTS = 1024
_NEAR = 6
"""Operations after which it no longer matters that the data have chosen rows."""
_PICKS = ("aten.index.", "aten.masked_select", "aten.nonzero")
_SUMS = ("aten.sum", "aten.nansum", "aten.count_nonzero", "aten.bincount", "aten.histc", "aten.dot")
_NOT_OF_USERS = tuple(
    str(path) for path in (Path(torch.__file__).parent, Path(pl.__file__).parent, Path(__file__).parents[2])
)


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
class _Ref:
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
    out: _Ref = _Ref(-1, 0)

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
        return self._computed(list(map(_read, self.leaves, rows)))

    @torch.enable_grad()
    def slopes(self, rows: Sequence[Tensor]) -> dict[int, Tensor]:
        """The gradients of the value by merged leaves, of those that have a graph."""
        leaves = [_read(leaf, row).requires_grad_(leaf.grad) for leaf, row in zip(self.leaves, rows, strict=True)]
        value = self._computed([leaf.clone() for leaf in leaves])
        wanted = {j: leaf for j, leaf in enumerate(leaves) if leaf.requires_grad}
        if not value.requires_grad:  # of sums that nobody has
            return {}
        found = torch.autograd.grad(value, [*wanted.values()], allow_unused=True, materialize_grads=True)
        return dict(zip(wanted, found, strict=True))

    def _computed(self, leaves: Sequence[Any]) -> Tensor:
        results = list[list[Any]]()

        def get(ref: _Ref) -> Any:
            return leaves[ref.k] if ref.op < 0 else results[ref.op][ref.k]

        for name, given in self.ops:
            args, kwargs = tree_map_only(_Ref, get, given)
            results.append(tree_leaves(_operation(name)(*args, **kwargs)))
        return get(self.out).reshape(())

    def merged(self, parts: Sequence[Sequence[Tensor]], device: torch.device | None = None) -> list[Tensor]:
        """Merge the leaves of parts."""
        return [
            _merged(torch.stack([row.to(device or row.device) for row in rows]), leaf.how)
            for leaf, rows in zip(self.leaves, zip(*parts, strict=True), strict=True)
        ]

    def fits(self, rows: Sequence[Tensor], value: Tensor) -> Tensor:
        """Whether a part's value is what the program makes of its leaves, of shape ()."""
        own, given = self.value(rows).double(), value.double()
        eps = torch.finfo(value.dtype).eps if value.is_floating_point() else 1e-7
        return torch.isclose(own, given, rtol=max(1e-9, 1e3 * eps), atol=1e-30, equal_nan=True)


Programs = Mapping[str, Program]
"""By the names of logged values; by samples where there is none."""


@dataclass
class _Entry:
    """An operation that was recorded.

    Args:
        args: flat; a tensor is replaced by a `_Ref` to the entry that made it, or by a copy of it if it is small.
        shapes: of the tensors among the arguments, None for others.
        results: copies, None where it is large.
        count: what its result is divided by; None if that is not known.
        has_grad: whether gradients go through it.
        node: the number that autograd gave to its node, or to the last one before.
        picked: over 0 if the data have chosen rows some operations before, so that their number is what the data say.
    """

    site: Site
    spec: Any
    args: list[Any]
    shapes: list[Any]
    results: list[Tensor | None]
    result_shapes: list[Any]
    count: Any
    has_grad: bool
    node: int
    picked: int


@dataclass
class Logged:
    """A value that a step has logged as a mean, or returned as its loss.

    Args:
        value: as it was given; `kept` is a copy.
        batch_size: as it was given.
        ref: what has computed it; None if that is not known, or if several were logged.
    """

    value: Any
    kept: Any
    batch_size: Any
    ref: _Ref | None

    @property
    def number(self) -> Any:
        """It as a float; None for others."""
        return _number(self.kept)


class Tape(TorchDispatchMode):
    """Records operations inside the block, from where the frame that enters it calls.

    Args:
        programs: of which the leaves are recorded; None records all.
    """

    def __init__(self, programs: Programs | None = None) -> None:
        super().__init__()
        self._programs = programs
        self._wanted: dict[Site, list[Leaf]] = {}
        for leaf in {leaf for program in (programs or {}).values() for leaf in program.leaves}:
            self._wanted.setdefault(leaf.site, []).append(leaf)
        self._names = {site[0] for site in self._wanted}
        self._found: dict[Leaf, Tensor] = {}
        self._nodes: dict[Leaf, int] = {}
        self._counts = Counter[Site]()
        self._frames = list[FrameType]()
        self.entries, self.by_site = list[_Entry](), dict[Site, _Entry]()
        self._makers: dict[Any, _Ref] = {}
        self._numbers: dict[float, _Ref] = {}
        self._kept: list[Any] = []  # their addresses are not used again
        self.logged: dict[str, Logged] = {}

    @override
    def __enter__(self) -> "Tape":
        self._frames.append(self._frames[0] if self._frames else sys._getframe(1))
        _tapes().append(self)
        return super().__enter__()

    @override
    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        _tapes().pop()
        self._frames.pop()  # which holds the tape

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        if name is None:  # made of others, which inference mode does not show
            with self:
                return func.decompose(*args, **kwargs)
        if name == "aten._local_scalar_dense.default" and not isinstance(args[0], Tensor):
            return args[0]  # a number of Python's that autograd has saved as a tensor
        result = func(*args, **kwargs)
        if self._programs is None or name in self._names:
            self._record(func, name, args, kwargs, result)
        return result

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True

    def _record(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        lines, frame = [name], sys._getframe(2)
        while frame is not None and frame is not self._frames[0]:
            if _is_users(frame.f_code):
                lines.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
            frame = frame.f_back
        called = tuple(lines)
        site = (*called, self._counts[called])
        self._counts[called] += 1
        flat, spec = tree_flatten((args, kwargs))
        results: list[Any] = tree_leaves(result)
        if self._programs is None:
            return self._keep(site, spec, flat, results, _count(func, args, kwargs, results))
        for leaf in self._wanted.get(site, ()):
            value = results[-leaf.slot - 1] if leaf.slot < 0 else flat[leaf.slot]
            count = _count(func, args, kwargs, results) if leaf.how == "mean" else None
            self._found[leaf] = _row(value, count, results)
            self._nodes[leaf] = _last_node()
        return None

    def _keep(self, site: Site, spec: Any, flat: list[Any], results: list[Any], count: Any) -> None:
        args = [self._maker(arg) or _small(arg) if isinstance(arg, Tensor) else arg for arg in flat]
        shapes, made = ([tuple(x.shape) if isinstance(x, Tensor) else None for x in some] for some in (flat, results))
        has_grad = torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in flat)
        has_grad = has_grad and site[0] != "aten.detach.default"
        picks = any(isinstance(arg, Tensor) and arg.dtype in (torch.bool, torch.uint8) for arg in flat[1:])
        picked = _NEAR * (site[0].startswith(_PICKS) and picks)
        picked = max([picked, *(self.entries[ref.op].picked - 1 for ref in args if isinstance(ref, _Ref))])
        count = _small(count) if isinstance(count, Tensor) else count
        copies = list(map(_small, results))
        entry = _Entry(site, spec, args, shapes, copies, made, count, has_grad, _last_node(), picked)
        self.by_site[site] = entry
        self.entries.append(entry)
        self._kept.append(results)
        for k, one in enumerate(results):
            if isinstance(one, Tensor):
                self._makers[_address(one), has_grad] = _Ref(len(self.entries) - 1, k)
            elif isinstance(one, float) and isinstance(args[0], _Ref):  # item()
                self._numbers[one] = args[0]

    def _maker(self, value: Tensor) -> _Ref | None:
        """What has made a tensor, of which another one, detached, may have the memory."""
        place, grad = _address(value), value.requires_grad
        return self._makers.get((place, grad)) or self._makers.get((place, not grad))

    def log(self, name: str, value: Any, batch_size: Any = None) -> None:
        """Note what is logged, and which result it is."""
        ref = self._maker(value) if isinstance(value, Tensor) else self._numbers.get(value)
        kept = value.detach().clone() if isinstance(value, Tensor) else value
        self.logged[name] = Logged(value, kept, batch_size, None if name in self.logged else ref)

    def rows(self, program: Program, device: torch.device | None = None) -> list[Tensor]:
        """The leaves of a program, each as a tensor of (presence, divisor, elements times divisor)."""
        found = [self._row(leaf) for leaf in program.leaves]
        like = next((row for row in found if row is not None), torch.empty(0, dtype=torch.float64))
        empty = (torch.zeros(size, dtype=torch.float64) for size in program.sizes)
        rows = (none if row is None else row for row, none in zip(found, empty, strict=True))
        return [row.to(device or like.device, like.dtype) for row in rows]

    def _row(self, leaf: Leaf) -> Tensor | None:
        value = self.value(leaf.site, leaf.slot)
        if value is None:
            return self._found.get(leaf)
        return _row(value, self.by_site[leaf.site].count if leaf.how == "mean" else None, ())

    def value(self, site: Site, slot: int) -> Any:
        """What was recorded of all at a place; None if nothing."""
        entry = self.by_site.get(site)
        if entry is None:
            return None
        value = entry.results[-1 - slot] if slot < 0 else entry.args[slot]
        return self.entries[value.op].results[value.k] if isinstance(value, _Ref) else value

    def numbers(self, program: Program) -> dict[int, int]:
        """By leaf, the numbers that autograd gave to the nodes that have computed them."""
        known = self._nodes | {leaf: entry.node for leaf in program.leaves if (entry := self.by_site.get(leaf.site))}
        return {j: known[leaf] for j, leaf in enumerate(program.leaves) if leaf.grad and leaf in known}


def _last_node() -> int:
    """The number of the node of the operation that is under way, if gradients go through it."""
    return torch._C._autograd._get_sequence_nr() - 1  # pyright: ignore[reportAttributeAccessIssue]


_local = threading.local()


def _tapes() -> list[Tape]:
    """Those that record in this thread, the innermost last."""
    return vars(_local).setdefault("tapes", [])


def active_tape() -> Tape | None:
    """The innermost tape that records in this thread."""
    return _tapes()[-1] if _tapes() else None


def _count(func: Any, args: Any, kwargs: Any, results: Sequence[Any]) -> Any:
    """What an operation divides by; None if that is not known."""
    name = func.__name__
    if "_backward" in name:  # of a pass in the step
        return None
    if name.startswith("mean."):
        return args[0].numel() / max(1, results[0].numel())
    for i, one in enumerate(func._schema.arguments):
        if one.name == "reduction":
            how = args[i] if i < len(args) else kwargs.get("reduction", one.default_value)
            return None if how != 1 else results[1] if name.startswith("nll") else args[0].numel()
    return None


def _row(value: Any, count: Any, like: Sequence[Any]) -> Tensor:
    device = next((one.device for one in (value, *like) if isinstance(one, Tensor)), torch.device("cpu"))
    dtype = precise_dtype(device)

    def flat(one: Any) -> Tensor:
        if isinstance(one, Tensor):
            return one.detach().to(device, dtype).flatten()
        return torch.full((1,), one, dtype=dtype, device=device)  # on the device, since copying it there would wait

    number, by = flat(value), flat(1.0 if count is None else count)
    return torch.cat([torch.ones_like(by), by, torch.where(by == 0, 0.0, number * by)])


def _merged(rows: Tensor, how: str) -> Tensor:
    present = rows[:, :1] > 0
    total = torch.where(present, rows, 0.0).sum(0)
    if how not in ("max", "min"):
        return total
    sign = 1 if how == "max" else -1
    return torch.cat([total[:2], sign * torch.where(present, sign * rows, -torch.inf).amax(0)[2:]])


def _read(leaf: Leaf, row: Tensor) -> Tensor:
    """The value of a leaf; 0 where no part has computed it."""
    value = row[2:] / row[1] if leaf.how == "mean" else row[2:] / row[0] if leaf.how == "same" else row[2:]
    value = torch.where(row[0] > 0, value, 0.0).reshape(leaf.shape)
    dtype = torch.float32 if leaf.dtype in (torch.float16, torch.bfloat16) else leaf.dtype
    return (value if dtype.is_floating_point else value.round()).to(dtype)


@cache
def _name(func: Any) -> str | None:
    """The name of an operation; None if it is made of others."""
    return None if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd) else str(func)


@cache
def _operation(name: str) -> Any:
    return reduce(getattr, name.split("."), torch.ops)


@cache
def _is_users(code: CodeType) -> bool:
    return not code.co_filename.startswith((*_NOT_OF_USERS, "<"))


def _address(value: Tensor) -> Any:
    known = type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided
    return (value.data_ptr(), tuple(value.shape)) if known else None


def _small(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) and value.numel() <= _MOST_ELEMENTS else None


@dataclass
class Seen:
    """A step on some samples: their number, and its tape."""

    num: int
    tape: Tape = field(default_factory=Tape)


class Comparison:
    """How the values of a step on some samples follow from those of parts of these."""

    def __init__(self, whole: Seen, parts: Sequence[Seen]) -> None:
        self.whole, self.parts, self.pieces = whole, parts, (whole, *parts)
        self._leaves: list[Leaf] = []
        self._ops: list[Any] = []
        self._refs: dict[_Ref, _Ref] = {}
        self._kinds = list[str]()
        for entry in whole.tape.entries:
            self._kinds.append(self._kind(entry))

    def programs(self) -> tuple[dict[str, Program], list[str]]:
        """The programs of logged values that are no mean over samples, and the names of those that have none."""
        found, unknown = dict[str, Program](), list[str]()
        for name, value in self.whole.tape.logged.items():
            is_everywhere = all(name in part.tape.logged for part in self.parts)
            if name == RETURNED or value.number is None or not is_everywhere or self._is_of_metric(name):
                continue
            if self._is_mean(name):
                continue
            program = self.program(name)
            if program is None:
                unknown.append(name)
            else:
                found[name] = program
        return found, unknown

    def _is_of_metric(self, name: str) -> bool:
        """Whether parts log what a metric returns once it has been given the whole batch."""
        return isinstance(self.parts[0].tape.logged[name].value, NoValue)

    def _is_mean(self, name: str) -> bool:
        """Whether a value is the mean of those of parts by samples, or by what was given as `batch_size`."""
        logged = [part.tape.logged[name] for part in self.parts]
        whole, values = self.whole.tape.logged[name], [one.number for one in logged]
        tolerance = _tolerance(whole.kept) * (1e-2 if _tolerance(whole.kept) < 1e-8 else 1.0)  # a program is exact
        for weights in ([part.num for part in self.parts], [_number(one.batch_size) for one in logged]):
            total = 0 if None in weights else sum(weights)
            if total and _near(sum(map(operator.mul, values, weights)) / total, whole.number, values, tolerance):
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
        rows = [part.tape.rows(program, _CPU) for part in self.parts]
        values = [part.tape.logged[name].number for part in self.parts]
        found = [float(program.value(own)) for own in (*rows, program.merged(rows))]
        tolerance = _tolerance(whole.kept)
        fits = (_near(a, b, values, tolerance) for a, b in zip(found, (*values, whole.number), strict=True))
        return program if all(fits) else None

    def entries(self, site: Site) -> list[tuple[_Entry, int]]:
        """What pieces have recorded at a place, and their samples, the whole first."""
        return [(entry, piece.num) for piece in self.pieces if (entry := piece.tape.by_site.get(site)) is not None]

    def _kind(self, entry: _Entry) -> str:
        """Whether an operation reduces the batch (`leaf`), or comes after (`op`); else empty."""
        others = [other for other, _ in self.entries(entry.site)]
        is_number = all(shape in ((), None) for shape in entry.result_shapes)
        by_data = torch.Tag.dynamic_output_shape in _operation(entry.site[0]).tags  # as many as others by chance
        if any(other.result_shapes != entry.result_shapes for other in others) or (by_data and not is_number):
            return ""
        given, varies = [i for i, shape in enumerate(entry.shapes) if shape is not None], self._varies(entry)
        after = any(isinstance(entry.args[i], _Ref) and self._kinds[entry.args[i].op] for i in given)
        if after and not varies and all(entry.args[i] is not None for i in given):
            return "op"
        return "leaf" if varies or is_number else ""

    def _varies(self, entry: _Entry) -> bool:
        """Whether the shapes of what an operation is given depend on the samples."""
        return any(other.shapes != entry.shapes for other, _ in self.entries(entry.site))

    def _ref(self, ref: _Ref) -> _Ref:
        if ref in self._refs:
            return self._refs[ref]
        entry, kind = self.whole.tape.entries[ref.op], self._kinds[ref.op]
        if kind == "leaf":
            self._refs[ref] = self._leaf(entry, -1 - ref.k)
        elif kind == "op":
            args, name = [self._arg(entry, i) for i in range(len(entry.args))], entry.site[0]
            if any(isinstance(arg, _Ref) and shape is None for arg, shape in zip(args, entry.shapes, strict=True)):
                name = name.replace(".Scalar", ".Tensor")  # of a number that varies
            self._ops.append((name, tree_unflatten(args, entry.spec)))
            self._refs |= {_Ref(ref.op, k): _Ref(len(self._ops) - 1, k) for k in range(len(entry.results))}
        else:
            raise LookupError
        return self._refs[ref]

    def _arg(self, entry: _Entry, i: int) -> Any:
        arg = entry.args[i]
        if isinstance(arg, _Ref) and self._kinds[arg.op]:
            return self._ref(arg)
        is_number = isinstance(arg, (int, float)) and not isinstance(arg, bool)
        varies = is_number and any(other.args[i] != arg for other, _ in self.entries(entry.site))
        return self._leaf(entry, i) if varies or entry.shapes[i] is not None else arg

    def _leaf(self, entry: _Entry, slot: int) -> _Ref:
        value = self.whole.tape.value(entry.site, slot)
        if value is None:
            raise LookupError
        number = torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        grad = slot < 0 and entry.has_grad and number.is_floating_point()
        counted = entry.count is not None and slot == -1
        # a sum of what has no rows, such as a penalty on weights, is the batch's own, also where it is 0 in all parts
        sums = entry.site[0].startswith(_SUMS) and slot < 0 and self._varies(entry)
        first = "mean" if counted else "sum" if sums else "same"
        for how in dict.fromkeys([first, "same", "sum", "max", "min"]):
            leaf = Leaf(entry.site, slot, how, tuple(number.shape), number.dtype, grad)
            if self._merges(leaf, number):
                self._leaves.append(leaf)
                return _Ref(-1, len(self._leaves) - 1)
        raise LookupError

    def _merges(self, leaf: Leaf, wanted: Tensor) -> bool:
        """Whether the whole's leaf is that of the parts, merged."""
        tolerance, program = _tolerance(wanted) if wanted.is_floating_point() else 1e-9, Program((leaf,), ())
        rows = torch.stack([row for part in self.parts for row in part.tape.rows(program, _CPU)])
        found = [_merged(rows, leaf.how), *(rows[rows[:, 0] > 0] if leaf.how == "same" else ())]
        close = partial(torch.isclose, rtol=tolerance, atol=tolerance * float(rows.nan_to_num()[:, 2:].abs().max()))
        return all(close(_read(leaf, row).double(), wanted.double().cpu(), equal_nan=True).all() for row in found)


def _number(value: Any) -> Any:
    """A number as a float; None for others."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_complex() else None
    return float(value) if isinstance(value, (int, float)) else None


def _tolerance(value: Any) -> float:
    return 1e-9 if isinstance(value, Tensor) and value.dtype is torch.float64 else 1e-4


def _near(one: float, other: float, parts: Sequence[float], tolerance: float) -> bool:
    if other != other or one != one:  # nan
        return one != one and other != other
    return abs(one - other) <= tolerance * max(1e-12, *(abs(part) for part in (other, *parts) if part == part))


@dataclass
class Values:
    """The programs of a run's logged values, and the leaves of the batch in process.

    Args:
        programs: by (name of the step, index of the loader).
        readings: of these steps what the `batch_size` of each name is: the number of `samples`, a `constant`, whatever
            the samples are, or another number that is `given`.
        rows: of these steps the arguments of metrics that are rows of samples, also where a part of one has a number.
        over_ranks: whether other ranks have parts of the batch.
        calls: of the step on the batch, of which there are several where an optimizer calls its closure again: by the
            names of the values, the rows of this process's part, and its own values.
    """

    programs: dict[tuple[str, int], Programs] = field(default_factory=dict[tuple[str, int], Programs])
    readings: dict[tuple[str, int], dict[str, str]] = field(default_factory=dict[tuple[str, int], dict[str, str]])
    rows: dict[tuple[str, int], set[Any]] = field(default_factory=dict[tuple[str, int], set[Any]])
    over_ranks: bool = False
    calls: list[tuple[dict[str, list[Tensor]], dict[str, Tensor]]] = field(default_factory=lambda: [({}, {})])

    def learn(self, step: str, loader: int, programs: Programs, readings: dict[str, str], rows: set[Any]) -> None:
        """Keep what was found of what a step logs, and of what it gives metrics."""
        place = step, loader
        self.programs[place], self.readings[place], self.rows[place] = programs, readings, rows

    def reading(self, step: str, loader: int, name: str) -> str:
        """What the `batch_size` of a value is; `samples` if that is not known."""
        return self.readings.get((step, loader), {}).get(name, "samples")

    def of(self, step: str, loader: int = 0) -> Programs:
        """The programs of what a step logs."""
        return {name: own for name, own in self.all_of(step, loader).items() if name != RETURNED}

    def all_of(self, step: str, loader: int = 0) -> Programs:
        """Those, and of its loss."""
        return self.programs.get((step, loader), {})

    def knows_none(self, step: str) -> bool:
        """Whether a step is known to have no programs."""
        known = [programs for (name, _), programs in self.programs.items() if name == step]
        return bool(known) and not any(known)

    def begin(self) -> None:
        """Begin another call of the step."""
        self.calls.append(({}, {}))

    def recorded(self, step: str, loader: int, module: pl.LightningModule, call: Callable[[], Any]) -> Any:
        """Run a step, and record what its logged values are computed of."""
        programs = self.all_of(step, loader)
        if not programs:
            return call()

        def log(keep: Callable[..., None], name: str, value: Any, *args: Any, **options: Any) -> None:
            keep(name, self.noted(name, value) if name in programs else value, *args, **options)

        own = map(module_log, lightning_modules(module))
        with received((one, partial(log, one.keep)) for one in own), Tape(programs) as tape:
            output = call()
        self.calls[-1][0].update((name, tape.rows(program)) for name, program in programs.items())
        return output

    def noted(self, name: str, value: Any) -> Any:
        """Note a value; returns what is logged for it until those of other ranks are known."""
        if not self.over_ranks or not isinstance(value, (Tensor, int, float)):
            return value
        self.calls[-1][1][name] = kept = torch.as_tensor(value).detach().clone().reshape(())
        return torch.where(kept.isnan(), torch.zeros_like(kept), kept)  # which would stay in sums

    def packed(self, programs: Programs, device: torch.device) -> Tensor:
        """What other ranks need of this one's part, of shape (n,)."""
        packed = list[Tensor]()
        for (rows, logged), (name, program) in product(self.calls, programs.items()):
            own = rows.get(name) if name in logged else None
            if own is None:
                packed.append(torch.zeros(1 + program.size))
            else:
                packed += [1 - program.fits(own, logged[name]).double().reshape(1), *own]
        return torch.cat([one.to(device, precise_dtype(device)) for one in packed])


def combined(programs: Programs, packed: Tensor) -> list[dict[str, Tensor]]:
    """The values of each call, of what all ranks have packed, of shape (ranks, n); nan where programs don't fit."""
    size = sum(1 + program.size for program in programs.values())
    return [_of_call(programs, own) for own in packed.split(size, 1)] if size else []


def _of_call(programs: Programs, packed: Tensor) -> dict[str, Tensor]:
    found, start = dict[str, Tensor](), 0
    for name, program in programs.items():
        rows = packed[:, start + 1 : start + 1 + program.size].split(program.sizes, 1)
        value = program.value([_merged(own, leaf.how) for own, leaf in zip(rows, program.leaves, strict=True)])
        found[name] = torch.where(packed[:, start].sum() > 0, torch.full_like(value, torch.nan), value)
        start += 1 + program.size
    return found
