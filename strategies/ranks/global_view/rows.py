"""Tensors of which each rank holds some rows, while every operation means what it means on all rows.

value           a rank holds                            its class
rows            its part of one dimension               `Rows` with a `Cut`
whole           all of it, the same on every rank       torch's
a view of rows  a copy of all rows, of which it is one  `Rows` with a `Copy`

`Rows` stand below autograd, which sees tensors of the global shape: what it computes in a backward pass are operations
like any other, so that gradients need no rules of their own. All ranks call the same operations in the same order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from .exchange import Cut

Rule = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
_COMPOSED = torch._C.DispatchKey.CompositeImplicitAutograd
RULES: dict[Any, Rule] = {}
"""Of an operation: computes it of rows, or returns NotImplemented where all rows must be gathered."""


def register(names: str, rule: Rule) -> None:
    """Register the rule of operations, by their names in `torch.ops.aten`; an overload follows a dot."""
    for name in names.split():
        packet, _, overload = name.partition(".")
        RULES[getattr(getattr(torch.ops.aten, packet), overload or "default")] = rule


@dataclass(eq=False)
class Home:
    """What tensors that share memory have in common: how often it was written to."""

    writes: int = 0


class Copy:
    """All rows of a tensor, through which views of single rows are read and written.

    Args:
        base: the tensor; what is written to it later is read again, and what is written to a view is written to it.
    """

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
        assert self._base.cut is not None
        self._base.local.copy_(self._base.cut.own(self.whole))
        self._base.home.writes += 1
        self._seen = self._base.home.writes


class Rows(Tensor):
    """A tensor of the global shape.

    Args:
        local: this rank's part.
        cut: which part that is; None if it is all, a view of a `Copy`.
        strides: of the whole, alike on all ranks; None for those of a contiguous tensor.
        home: of the tensor of which `local` is a view.
        known: all rows, where they are known without an exchange.
    """

    local: Tensor
    cut: Cut | None
    home: Home
    known: tuple[Tensor, int] | None
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
        own.local, own.cut, own.home, own.copy = local, cut, home or Home(), copy
        own.known = None if known is None else (known, own.home.writes)
        return own

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(op, args, kwargs or {})

    def whole(self) -> Tensor:
        """All rows, in autograd's graph, as a tensor of torch's own class."""
        return _Whole.apply(self)  # pyright: ignore[reportReturnType]  # untyped

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self.whole())

    def __format__(self, spec: str) -> str:
        return format(self.whole(), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.whole().detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().detach().__reduce_ex__(protocol)

    def tolist(self) -> Any:
        """All rows, as torch's method gives them."""
        return self.whole().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """All rows, as torch's method gives them."""
        return self.whole().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self.whole().__array__(dtype)


class _Whole(torch.autograd.Function):
    """All rows; a gradient of all rows is already the whole batch's."""

    @staticmethod
    def forward(ctx: Any, rows: Rows) -> Tensor:
        found = gathered(rows)
        return found if rows.cut is not None and rows.known is None else found.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


def gathered(value: Any) -> Any:
    """All rows of a tensor; another value is returned."""
    if type(value) is not Rows:
        return value
    if value.cut is None:
        if value.copy is not None:
            value.copy.refresh()
        return value.local
    if value.known is not None and value.known[1] == value.home.writes:
        return value.known[0]
    return value.cut.exchange.gather(value.local, value.cut)


class Facts(NamedTuple):
    """What the schema of an operation says.

    Args:
        written: places of arguments that it writes to, by number or, of keywords only, by name.
        views: whether it returns views of its first argument.
        composed: whether torch composes it of others.
    """

    written: tuple[int | str, ...]
    views: bool
    composed: bool


@cache
def facts(op: Any) -> Facts:
    """Read the schema of an operation."""
    written = [
        argument.name if argument.kwarg_only else i
        for i, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    returned = [value.alias_info for value in op._schema.returns]
    views = not written and any(info is not None for info in returned)
    return Facts(tuple(written), views, op.has_kernel_for_dispatch_key(_COMPOSED))


def each(function: Callable[[Any], Any], args: Sequence[Any]) -> list[Any]:
    """Apply a function to arguments, and to the elements of those that are lists."""
    return [[function(one) for one in arg] if isinstance(arg, (list, tuple)) else function(arg) for arg in args]


def are_cut(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether any argument is cut."""
    for arg in (*args, *kwargs.values()):
        if type(arg) is Rows:
            if arg.cut is not None:
                return True
        elif isinstance(arg, (list, tuple)) and any(type(one) is Rows and one.cut is not None for one in arg):
            return True
    return False


def dispatch(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute an operation of tensors some of which are cut."""
    if torch.Tag.inplace_view in op.tags and type(args[0]) is Rows:
        return _become_view(op, args, kwargs)
    if are_cut(args, kwargs):
        rule = RULES.get(op)
        if rule is not None:
            found = rule(op, args, kwargs)
        else:
            found = op.decompose(*args, **kwargs) if facts(op).composed else NotImplemented
        if found is not NotImplemented:
            return found
    return on_all_rows(op, args, kwargs)


def on_all_rows(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute an operation of all rows, on every rank."""
    known = facts(op)
    if known.views:
        return _view(op, args, kwargs)
    given = each(gathered, args)
    options = dict(zip(kwargs, each(gathered, list(kwargs.values())), strict=True))
    note(op, args, kwargs)
    result = op(*given, **options)
    if not known.written:
        return result
    same: dict[int, Any] = {}
    for place in known.written:
        before: Any
        after: Any
        before, after = (
            (args[place], given[place]) if isinstance(place, int) else (kwargs.get(place), options.get(place))
        )
        for own, whole in zip(before, after, strict=True) if isinstance(before, (list, tuple)) else [(before, after)]:
            if own is None:
                continue
            same[id(whole)] = own
            if type(own) is Rows:
                _write(own, whole)
    if isinstance(result, (list, tuple)):
        return type(result)(same.get(id(one), one) for one in result)
    return same.get(id(result), result)


def _write(own: Rows, whole: Tensor) -> None:
    if own.cut is not None:
        own.local.copy_(own.cut.own(whole))
        own.home.writes += 1
    elif own.copy is not None:
        own.copy.write_back()


def _view(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Take views of all rows."""
    base: Rows = args[0]
    copy = base.copy
    if base.cut is not None:
        note(op, args, kwargs)
        copy = Copy(base)
    assert copy is not None
    copy.refresh()
    whole = copy.whole if base.cut is not None else base.local
    given = op(whole, *each(gathered, args[1:]), **kwargs)
    if isinstance(given, (list, tuple)):
        return [Rows(one, None, one.stride(), copy=copy) for one in given]
    return Rows(given, None, given.stride(), copy=copy)


def _become_view(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Make a tensor a view of itself, as `unsqueeze_` does."""
    rows: Rows = args[0]
    name, overload = op.name().removeprefix("aten::").partition(".")[::2]
    packet = getattr(torch.ops.aten, name.removesuffix("_"))
    plain = getattr(packet, overload or ("int" if name == "transpose_" else "default"))
    view = dispatch(plain, args, kwargs)
    rows.local, rows.cut, rows.home, rows.copy, rows.known = view.local, view.cut, view.home, view.copy, None
    with no_dispatch():
        op(*args, **kwargs)
    return rows


def note(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Count an operation for which rows are gathered."""
    for arg in (*args, *kwargs.values()):
        for one in arg if isinstance(arg, (list, tuple)) else (arg,):
            if type(one) is Rows and one.cut is not None:
                one.cut.exchange.count(str(op.overloadpacket).removeprefix("aten."), 0 if one.known else one.nbytes)
