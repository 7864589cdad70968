"""Record the operations of a step, all of them or the leaves of programs; see `programs.py`."""

import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves
from typing_extensions import override

from .programs import NUMBER, Leaf, Program, Programs, Ref, Site, row_of

_MOST_ELEMENTS = 1024
_ARITHMETIC = tuple(f"aten.{name}.Tensor" for name in ("add", "sub", "rsub", "mul", "div"))
_NEAR = 6
"""Operations after which it no longer matters that the data have chosen rows."""
_PICKS = ("aten.index.", "aten.masked_select", "aten.nonzero")
_NOT_OF_USERS = tuple(
    str(path) for path in (Path(torch.__file__).parent, Path(pl.__file__).parent, Path(__file__).parents[2])
)
_OF_SHARDS = str(Path(torch.__file__).parent / "distributed" / "fsdp")


@dataclass
class Entry:
    """An operation that was recorded.

    Args:
        args: flat; a tensor is replaced by a `Ref` to the entry that made it, or by a copy of it if it is small.
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
    ref: Ref | None

    @property
    def number(self) -> Any:
        """It as a float; None for others."""
        return number_of(self.kept)


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
        self._others = {site[0] for site in self._wanted if site[1:2] != (NUMBER,)}
        self._found: dict[Leaf, Tensor] = {}
        self._nodes: dict[Leaf, int] = {}
        self._counts = Counter[Site]()
        self._frames = list[FrameType]()
        self.entries, self.by_site = list[Entry](), dict[Site, Entry]()
        self._makers: dict[Any, Ref] = {}
        self._numbers: dict[float, Ref] = {}
        self._frees = False
        """Whether parameters are gathered, whose memory is used again."""
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
        by_number = name in _ARITHMETIC and any(isinstance(arg, (int, float)) for arg in args[:2])
        if not by_number and self._programs is not None and name not in self._others:
            return None
        lines, frame = [name, NUMBER] if by_number else [name], sys._getframe(2)
        while frame is not None and frame is not self._frames[0]:
            if _gathers(frame.f_code):
                self._frees = True
                return None  # whose results would be kept
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
            self._found[leaf] = row_of(value, count, results)
            self._nodes[leaf] = _last_node()
        return None

    def _keep(self, site: Site, spec: Any, flat: list[Any], results: list[Any], count: Any) -> None:
        args = [self._maker(arg) or _small(arg) if isinstance(arg, Tensor) else arg for arg in flat]
        shapes, made = ([tuple(x.shape) if isinstance(x, Tensor) else None for x in some] for some in (flat, results))
        has_grad = torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in flat)
        has_grad = has_grad and site[0] != "aten.detach.default"
        picks = any(isinstance(arg, Tensor) and arg.dtype in (torch.bool, torch.uint8) for arg in flat[1:])
        picked = _NEAR * (site[0].startswith(_PICKS) and picks)
        picked = max([picked, *(self.entries[ref.op].picked - 1 for ref in args if isinstance(ref, Ref))])
        count = _small(count) if isinstance(count, Tensor) else count
        copies = list(map(_small, results))
        entry = Entry(site, spec, args, shapes, copies, made, count, has_grad, _last_node(), picked)
        self.by_site[site] = entry
        self.entries.append(entry)
        self._kept.append(results)
        unknown = [arg for arg, ref in zip(flat, args, strict=True) if not isinstance(ref, Ref)] if self._frees else []
        freed = {_address(arg)[0] for arg in unknown if isinstance(arg, Tensor) and _address(arg)}
        for k, one in enumerate(results):
            if isinstance(one, Tensor) and (not freed or not _address(one) or _address(one)[0] not in freed):
                self._makers[_address(one), has_grad] = Ref(len(self.entries) - 1, k)
            elif isinstance(one, float) and isinstance(args[0], Ref):  # item()
                self._numbers[one] = args[0]

    def _maker(self, value: Tensor) -> Ref | None:
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
        return row_of(value, self.by_site[leaf.site].count if leaf.how == "mean" else None, ())

    @property
    def shapes(self) -> dict[Site, Any]:
        """The shapes of the results of all operations."""
        return {site: entry.result_shapes for site, entry in self.by_site.items()}

    def value(self, site: Site, slot: int) -> Any:
        """What was recorded of all at a place; None if nothing."""
        entry = self.by_site.get(site)
        if entry is None:
            return None
        value = entry.results[-1 - slot] if slot < 0 else entry.args[slot]
        return self.entries[value.op].results[value.k] if isinstance(value, Ref) else value

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


@cache
def _name(func: Any) -> str | None:
    """The name of an operation; None if it is made of others."""
    return None if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd) else str(func)


@cache
def _gathers(code: CodeType) -> bool:
    """Whether code is that of torch's FSDP, whose hooks gather parameters around what they are used in."""
    return code.co_filename.startswith(_OF_SHARDS)


@cache
def _is_users(code: CodeType) -> bool:
    return not code.co_filename.startswith((*_NOT_OF_USERS, "<"))


def _address(value: Tensor) -> Any:
    known = type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided
    return (value.data_ptr(), tuple(value.shape)) if known else None


def _small(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) and value.numel() <= _MOST_ELEMENTS else None


def number_of(value: Any) -> Any:
    """A number as a float; None for others."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_complex() else None
    return float(value) if isinstance(value, (int, float)) else None
