"""Tensors of which each rank holds some rows, while every operation means what it means on all rows.

value           a rank holds                            its class
rows            its part of one dimension               `Rows` with a `Cut`
whole           all of it, the same on every rank       torch's
a view of rows  a copy of all rows, of which it is one  `Rows` with a `Copy`

`Rows` stand below autograd, which sees tensors of the global shape: what it computes in a backward pass are operations
like any other, so that gradients need no rules of their own. All ranks call the same operations in the same order.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from ...distributed.objects import gather_unequal


def summed_over_ranks(local: Tensor) -> Tensor:
    """Sum a tensor, whose memory nobody else uses, over the ranks."""
    total = local.contiguous()
    torch.distributed.all_reduce(torch.view_as_real(total) if total.is_complex() else total)
    return total


@dataclass(frozen=True)
class Cut:
    """Which part of a dimension each rank holds: blocks of these sizes in order of rank; `rank` is this one's."""

    dim: int
    sizes: tuple[int, ...]
    rank: int

    @cached_property
    def length(self) -> int:
        """Of the whole dimension."""
        return sum(self.sizes)

    @cached_property
    def own_length(self) -> int:
        """Of this rank's part of it."""
        return self.sizes[self.rank]

    def whole_shape(self, shape: Sequence[int]) -> list[int]:
        """Shape of the whole, of which a rank holds a part of `shape`."""
        return [*shape[: self.dim], self.length, *shape[self.dim + 1 :]]

    def own_shape(self, shape: Sequence[int]) -> list[int]:
        """Shape of a rank's part of a whole of `shape`."""
        return [*shape[: self.dim], self.own_length, *shape[self.dim + 1 :]]

    def at(self, dim: int) -> "Cut":
        """The same of another dimension."""
        return self if dim == self.dim else Cut(dim, self.sizes, self.rank)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole."""
        return whole.narrow(self.dim, sum(self.sizes[: self.rank]), self.own_length)

    def gather(self, local: Tensor) -> Tensor:
        """What all ranks hold of the dimension."""
        rows = local.resolve_conj().resolve_neg().movedim(self.dim, 0).contiguous()
        # as bytes, since gloo lacks some types
        found = gather_unequal(rows.unsqueeze(-1).view(torch.uint8), self.sizes)
        return found.view(rows.dtype).squeeze(-1).movedim(0, self.dim).contiguous()


Rule = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
_RULES: dict[Any, Rule] = {}


def register(rules: Mapping[str, Rule]) -> None:
    """Register rules, by names in `torch.ops.aten`; they return NotImplemented where all rows must be gathered."""
    for names, rule in rules.items():
        for name in names.split():
            packet, _, overload = name.partition(".")
            _RULES[getattr(getattr(torch.ops.aten, packet), overload or "default")] = rule


@dataclass(eq=False)
class Home:
    """What tensors that share memory have in common: how often it was written to."""

    writes: int = 0


class Copy:
    """All rows of a tensor, which are read again when it was written to; what is written to a view is written to it."""

    def __init__(self, base: "Rows") -> None:
        self._base = base
        self.whole = gathered(base).clone()
        self._seen = base.home.writes

    def refresh(self) -> None:
        """Read the rows again if they have changed."""
        if self._seen != self._base.home.writes:
            self.whole.copy_(gathered(self._base))
            self._seen = self._base.home.writes

    def write_back(self) -> None:
        """Write the copy, of which a view was written to, to the rows."""
        self._base.write(self.whole)
        self._seen = self._base.home.writes


def _of_whole(name: str) -> Any:
    def method(rows: "Rows", *args: Any, **kwargs: Any) -> Any:
        return getattr(rows.whole(), name)(*args, **kwargs)

    return method


class Rows(Tensor):
    """A tensor of the global shape.

    Args:
        local: this rank's part.
        cut: which part that is; None if it is all, a view of a `Copy` or of known rows.
        strides: of the whole, alike on all ranks; None for those of a contiguous tensor.
        home: of the tensor of which `local` is a view.
        known: all rows, where every rank has them: `local` is a view of them, and they are written to as a whole.
    """

    local: Tensor
    cut: Cut | None
    home: Home
    known: Tensor | None
    copy: Copy | None
    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(  # noqa: D102  # the class has them
        cls: "type[Rows]",
        local: Tensor,
        cut: Cut | None,
        strides: Sequence[int] | None = None,
        home: Home | None = None,
        known: Tensor | None = None,
        copy: Copy | None = None,
    ) -> "Rows":
        shape: Any = local.shape if cut is None else cut.whole_shape(local.shape)
        given: Any = {"strides": strides, "dtype": local.dtype, "device": local.device, "layout": local.layout}
        own: Any = torch.Tensor._make_wrapper_subclass(cls, shape, **given)
        own.local, own.cut, own.home, own.known, own.copy = local, cut, home or Home(), known, copy
        return own

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(op, args, kwargs or {})

    def whole(self) -> Tensor:
        """A copy of all rows, of torch's own class, which is a leaf of autograd's graph."""
        return gathered(self.detach()).clone().requires_grad_(self.requires_grad)

    def write(self, whole: Tensor) -> None:
        """Write this rank's part of all rows, unless a view of them was written to."""
        if self.copy is not None:
            self.copy.write_back()
            return
        if self.cut is not None:
            self.local.copy_(self.cut.own(whole))
        self.home.writes += 1

    __repr__, __format__, __array__ = map(_of_whole, ("__repr__", "__format__", "__array__"))
    tolist, numpy = map(_of_whole, ("tolist", "numpy"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.whole().detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().detach().__reduce_ex__(protocol)


def rows_of(whole: Any, rank: int, num: int) -> Any:
    """Rows of a tensor that every one of `num` ranks has, if it has enough of them; another value is returned."""
    if type(whole) is not Tensor or whole.layout is not torch.strided or whole.requires_grad:
        return whole
    size = whole.shape[0] if whole.dim() else 0
    if size < max(2, num) or 0 in whole.shape or 0 in whole.stride():
        return whole
    cut = Cut(0, tuple(size // num + (i < size % num) for i in range(num)), rank)
    return Rows(cut.own(whole), cut, whole.stride(), known=whole)


def is_cut(value: Any) -> bool:
    """Whether a value is a tensor of which each rank holds a part."""
    return type(value) is Rows and value.cut is not None


def gathered(value: Any) -> Any:
    """All rows of a tensor; another value is returned."""
    if type(value) is not Rows:
        return value
    if value.cut is None:
        if value.copy is not None:
            value.copy.refresh()
        return value.local
    return value.cut.gather(value.local) if value.known is None else value.known


@cache
def written(op: Any) -> tuple[int | str, ...]:
    """Places of arguments that an operation writes to, by number or, of keywords only, by name."""
    return tuple(
        argument.name if argument.kwarg_only else i
        for i, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def flat(args: Iterable[Any]) -> Iterator[Any]:
    """Arguments, and the elements of those that are lists."""
    return chain.from_iterable(arg if isinstance(arg, (list, tuple)) else (arg,) for arg in args)


def each(function: Callable[[Any], Any], args: Iterable[Any]) -> list[Any]:
    """Apply a function to arguments, and to the elements of those that are lists."""
    return [[function(one) for one in arg] if isinstance(arg, (list, tuple)) else function(arg) for arg in args]


def dispatch(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute an operation of tensors some of which are cut."""
    rule = _RULES.get(op)
    if rule is None and torch.Tag.inplace_view in op.tags and type(args[0]) is Rows:
        return _become_view(op, args, kwargs)
    if not any(map(is_cut, flat((*args, *kwargs.values())))):
        return on_all_rows(op, args, kwargs)
    found: Any = NotImplemented
    if rule is None:
        found = op.decompose(*args, **kwargs)
    elif not written(op) or getattr(args[0], "known", None) is None:
        found = rule(op, args, kwargs)
    return on_all_rows(op, args, kwargs) if found is NotImplemented else found


def on_all_rows(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute an operation of all rows, on every rank."""
    if not written(op) and any(value.alias_info for value in op._schema.returns):
        return _view(op, args, kwargs)
    given = each(gathered, args)
    options = dict(zip(kwargs, each(gathered, kwargs.values()), strict=True))
    result = op(*given, **options)
    same: dict[int, Any] = {}
    for place in written(op):
        pair = (args[place], given[place]) if isinstance(place, int) else (kwargs.get(place), options.get(place))
        for own, whole in zip(*(flat([one]) for one in pair), strict=True):
            same[id(whole)] = own
            if type(own) is Rows:
                own.write(whole)
    if isinstance(result, (list, tuple)):
        return type(result)(same.get(id(one), one) for one in result)
    return same.get(id(result), result)


def _view(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Take views of all rows."""
    base: Rows = args[0]
    copy = base.copy if base.cut is None or base.known is not None else Copy(base)
    whole = copy.whole if copy is not None and base.cut is not None else gathered(base)
    given = op(whole, *each(gathered, args[1:]), **kwargs)
    found = [Rows(one, None, one.stride(), base.home, copy=copy) for one in flat([given])]
    return found if isinstance(given, (list, tuple)) else found[0]


def _become_view(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Make a tensor a view of itself, as `unsqueeze_` does."""
    rows: Rows = args[0]
    plain = getattr(torch.ops.aten, op.overloadpacket.__name__.removesuffix("_"))
    overload = op._overloadname if op._overloadname in plain.overloads() else plain.overloads()[0]
    vars(rows).update(vars(dispatch(getattr(plain, overload), args, kwargs)))
    with no_dispatch():
        op(*args, **kwargs)
    return rows
