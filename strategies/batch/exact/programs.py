"""Compute losses and logged values of a whole batch from its parts: of sums, which add up, and of what comes after.

A value is a program of `leaves`, numbers that reduce the batch (sums, means, counts), and of further operations.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only
from typing_extensions import override

from ...core.devices import precise_dtype

Site = tuple[Any, ...]
"""An operation's name, the lines of code that called it, and how many such calls were before it in the step."""

NUMBER = "by a number"
"""In the site of an operation that adds or multiplies by a number of Python's, which may be another in each step."""

RETURNED = "the loss"
"""Stands for the name of the loss that a training step returns, which need not be logged."""

_MOST_ELEMENTS = 1024
_ARITHMETIC = {f"aten.{name}.Tensor" for name in ("add", "sub", "rsub", "mul", "div")}
_NEAR = 6
"""Operations after which it no longer matters that the data have chosen rows."""
_PICKS = ("aten.index.", "aten.masked_select", "aten.nonzero")
_NOT_OF_USERS = tuple(
    str(path) for path in (Path(torch.__file__).parent, Path(pl.__file__).parent, Path(__file__).parents[2])
)
_OF_SHARDS = str(Path(torch.__file__).parent / "distributed" / "fsdp")


class Leaf(NamedTuple):
    """Numbers of a batch that merge over its parts: a result of an operation, from -1 down, or an argument, from 0 on.

    `how` they merge: `mean`, by what it is divided by; `sum`, `max`, `min`; `same` in all parts. `grad`: has a graph.
    """

    site: Site
    slot: int
    how: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool = False

    @property
    def size(self) -> int:
        """Elements of its row: presence, divisor, and the numbers times the divisor."""
        return 2 + torch.Size(self.shape).numel()

    def merged(self, rows: Tensor) -> Tensor:
        """The row of a batch, of those of its parts."""
        present = rows[:, :1] > 0
        total = torch.where(present, rows, 0.0).sum(0)
        if self.how not in ("max", "min"):
            return total
        sign = 1 if self.how == "max" else -1
        return torch.cat([total[:2], sign * torch.where(present, sign * rows, -torch.inf).amax(0)[2:]])

    def read(self, row: Tensor) -> Tensor:
        """The numbers of a row; 0 where no part has computed them."""
        value = row[2:] / row[1] if self.how == "mean" else row[2:] / row[0] if self.how == "same" else row[2:]
        value = torch.where(row[0] > 0, value, 0.0).reshape(self.shape)
        dtype = torch.float32 if self.dtype in (torch.float16, torch.bfloat16) else self.dtype
        return (value if dtype.is_floating_point else value.round()).to(dtype)


@dataclass(frozen=True)
class Ref:
    """The k-th result of an operation of a program, or leaf k, for which `op` is -1."""

    op: int
    k: int


@dataclass(frozen=True)
class Program:
    """How a value is computed from leaves; `ops` are the name and the arguments of each operation."""

    leaves: tuple[Leaf, ...] = ()
    ops: tuple[tuple[str, Any], ...] = ()
    out: Ref = Ref(-1, 0)

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of each leaf's row."""
        return [leaf.size for leaf in self.leaves]

    @torch.no_grad()
    def value(self, rows: Tensor) -> Tensor:
        """The value of a batch by the rows of its leaves, of shape (elements,)."""
        return self._computed([leaf.read(row) for leaf, row in zip(self.leaves, rows.split(self.sizes), strict=True)])

    @torch.enable_grad()
    def slopes(self, rows: Tensor) -> dict[int, Tensor]:
        """The gradients of the value by its leaves, of those that have a graph."""
        pairs = zip(self.leaves, rows.split(self.sizes), strict=True)
        leaves = [leaf.read(row).requires_grad_(leaf.grad) for leaf, row in pairs]
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

    def merged(self, parts: Tensor) -> Tensor:
        """The rows of a batch, of those of its parts, of shape (parts, elements)."""
        pairs = zip(self.leaves, parts.split(self.sizes, 1), strict=True)
        return torch.cat([leaf.merged(rows) for leaf, rows in pairs])

    def fits(self, rows: Tensor, value: Tensor) -> Tensor:
        """Whether a part's value is what the program makes of its leaves, of shape (): else other operations ran."""
        own, given = self.value(rows).double(), value.double()
        eps = torch.finfo(value.dtype).eps if value.is_floating_point() else 1e-7
        return torch.isclose(own, given, rtol=max(1e-9, 1e3 * eps), atol=1e-30, equal_nan=True)


Programs = Mapping[str, Program]
"""By the names of logged values; by samples where there is none."""


@dataclass
class Entry:
    """An operation that was recorded; of large tensors there are shapes alone.

    Args:
        args: flat; a tensor is replaced by a `Ref` to the entry that made it, or by a copy of it if it is small.
        count: what its result is divided by; None if that is not known.
        node: the number that autograd gave to its node, or to the last one before.
        picked: over 0 if the data have chosen rows some operations before, so that their number is what the data say.
    """

    site: Site
    spec: Any
    args: list[Any]
    shapes: list[Any]
    results: list[Any]
    result_shapes: list[Any]
    count: Any
    has_grad: bool
    node: int
    picked: int


class Logged(NamedTuple):
    """What a step has logged as a mean, or returned; `ref` is what has computed it, if that is known, and once."""

    value: Any
    kept: Any
    batch_size: Any
    ref: Ref | None


class Tape(TorchDispatchMode):
    """Records operations in the block, from where the frame that enters it calls: all, or the leaves of programs."""

    def __init__(self, programs: Programs | None = None) -> None:
        super().__init__()
        self._records_all, self._wanted = programs is None, dict[Site, list[Leaf]]()
        for leaf in {leaf for program in (programs or {}).values() for leaf in program.leaves}:
            self._wanted.setdefault(leaf.site, []).append(leaf)
        self._heads = {site[: 1 + (site[1:2] == (NUMBER,))] for site in self._wanted}
        self._found: dict[Leaf, tuple[Tensor, int]] = {}
        self._counts = Counter[Site]()
        self._frames = list[FrameType]()
        self.entries, self.by_site = list[Entry](), dict[Site, Entry]()
        self._makers: dict[Any, Ref] = {}
        self._numbers: dict[float, Ref] = {}  # what they are `item()` of
        self._frees = False
        """Whether parameters are gathered, whose memory is used again."""
        self._kept: list[Any] = []  # their addresses are not used again
        self.logged: dict[str, Logged] = {}

    @override
    def __enter__(self) -> "Tape":
        self._frames.append(self._frames[0] if self._frames else sys._getframe(1))
        return super().__enter__()

    @override
    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
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
        by_number = name in _ARITHMETIC and any(isinstance(arg, (int, float)) for arg in args[:2])
        head = (name, NUMBER) if by_number else (name,)
        if self._records_all or head in self._heads:
            self._record(head, func, args, kwargs, result)
        return result

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True

    def _record(self, head: Site, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        lines, frame = [*head], sys._getframe(2)
        while frame is not None and frame is not self._frames[0]:
            caller = _caller(frame.f_code)
            if caller is None:  # whose results would be kept
                self._frees = True
                return
            if caller:
                lines.append(f"{caller}:{frame.f_lineno}")
            frame = frame.f_back
        called: Site = tuple(lines)
        site: Site = (*called, self._counts[called])
        self._counts[called] += 1
        if not self._records_all and site not in self._wanted:
            return
        flat, spec = tree_flatten((args, kwargs))
        results: list[Any] = tree_leaves(result)
        # the number of the node that is under way, if gradients go through it
        node: int = torch._C._autograd._get_sequence_nr() - 1  # pyright: ignore[reportAttributeAccessIssue]
        for leaf in self._wanted.get(site, ()):
            value = results[-leaf.slot - 1] if leaf.slot < 0 else flat[leaf.slot]
            count = _count(func, args, kwargs, results) if leaf.how == "mean" else 1.0
            self._found[leaf] = _row(value, count, results), node
        if not self._records_all:
            return
        given = [self._maker(arg) or _small(arg) if isinstance(arg, Tensor) else arg for arg in flat]
        shapes, made = ([tuple(x.shape) if isinstance(x, Tensor) else None for x in some] for some in (flat, results))
        has_grad = torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in flat)
        has_grad = has_grad and head[0] != "aten.detach.default"
        picks = any(isinstance(arg, Tensor) and arg.dtype in (torch.bool, torch.uint8) for arg in flat[1:])
        picked = _NEAR * (head[0].startswith(_PICKS) and picks)
        picked = max([picked, *(self.entries[ref.op].picked - 1 for ref in given if isinstance(ref, Ref))])
        count, copies = _small(_count(func, args, kwargs, results)), list(map(_small, results))
        entry = Entry(site, spec, given, shapes, copies, made, count, has_grad, node, picked)
        self.by_site[site] = entry
        self.entries.append(entry)
        self._kept.append(results)
        unknown = [arg for arg, ref in zip(flat, entry.args, strict=True) if not isinstance(ref, Ref)]
        freed = {_address(arg)[0] for arg in unknown if self._frees and isinstance(arg, Tensor) and _address(arg)}
        for k, one in enumerate(results):
            if isinstance(one, Tensor) and not (freed and _address(one) and _address(one)[0] in freed):
                self._makers[_address(one), has_grad] = Ref(len(self.entries) - 1, k)
            elif isinstance(one, float) and isinstance(entry.args[0], Ref):  # item()
                self._numbers[one] = entry.args[0]

    def _maker(self, value: Tensor) -> Ref | None:
        """What has made a tensor, of which another one, detached, may have the memory."""
        place, grad = _address(value), value.requires_grad
        return self._makers.get((place, grad)) or self._makers.get((place, not grad))

    def log(self, name: str, value: Any, batch_size: Any = None) -> None:
        """Note what is logged, and which result it is."""
        ref = self._maker(value) if isinstance(value, Tensor) else self._numbers.get(value)
        kept = value.detach().clone() if isinstance(value, Tensor) else value
        self.logged[name] = Logged(value, kept, batch_size, None if name in self.logged else ref)

    def rows(self, program: Program, device: torch.device | None = None) -> Tensor:
        """The rows of a program's leaves; zeros of those that were not computed."""
        found = [own and own[0] for own in map(self.found, program.leaves)]
        device = device or next((row.device for row in found if row is not None), torch.device("cpu"))
        return torch.cat([
            torch.zeros(leaf.size, dtype=precise_dtype(device), device=device)
            if row is None or len(row) != leaf.size
            else row.to(device, precise_dtype(device))
            for leaf, row in zip(program.leaves, found, strict=True)
        ])  # fmt: skip

    def found(self, leaf: Leaf) -> tuple[Tensor, int] | None:
        """The row of a leaf, and the number of the node that has computed it; None if it was not computed."""
        entry, value = self.by_site.get(leaf.site), self.value(leaf.site, leaf.slot)
        if entry is None or value is None:
            return self._found.get(leaf)
        return _row(value, entry.count if leaf.how == "mean" else 1.0, entry.results), entry.node

    @property
    def shapes(self) -> dict[Site, Any]:
        """The shapes of the results of all operations."""
        return {site: entry.result_shapes for site, entry in self.by_site.items()}

    def value(self, site: Site, slot: int) -> Any:
        """What was recorded at a place; None if nothing."""
        entry = self.by_site.get(site)
        if entry is None:
            return None
        value = entry.results[-1 - slot] if slot < 0 else entry.args[slot]
        return self.entries[value.op].results[value.k] if isinstance(value, Ref) else value


def _row(value: Any, count: Any, like: Sequence[Any]) -> Tensor:
    """A leaf as (presence, divisor, elements times divisor), on the device of `value` or of what is `like` it."""
    device = next((one.device for one in (value, *like) if isinstance(one, Tensor)), torch.device("cpu"))

    def flat(one: Any) -> Tensor:
        if isinstance(one, Tensor):
            return one.detach().to(device, precise_dtype(device)).flatten()
        return torch.full((1,), one, dtype=precise_dtype(device), device=device)  # copying it there would wait

    number, by = flat(value), flat(count)
    return torch.cat([torch.ones_like(by), by, torch.where(by == 0, 0.0, number * by)])


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


@cache
def _name(func: Any) -> str | None:
    """The name of an operation; None if it is made of others."""
    return None if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd) else str(func)


@cache
def _caller(code: CodeType) -> str | None:
    """The name of a function of users', empty for others; None for the hooks by which torch's FSDP gathers."""
    name = code.co_filename
    return None if name.startswith(_OF_SHARDS) else "" if name.startswith((*_NOT_OF_USERS, "<")) else code.co_name


def _address(value: Tensor) -> Any:
    known = type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided
    return (value.data_ptr(), tuple(value.shape)) if known else None


def _small(value: Any) -> Any:
    """A copy of a tensor that is not large, for which None stands; all else as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone() if value.numel() <= _MOST_ELEMENTS else None


def number_of(value: Any) -> Any:
    """A number as a float; None for others."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_complex() else None
    return float(value) if isinstance(value, (int, float)) else None


@cache
def operation(name: str) -> Any:
    """The operation of torch that has a name."""
    return reduce(getattr, name.split("."), torch.ops)
