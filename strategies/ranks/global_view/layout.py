"""Rules of views, and of joining and choosing."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from .elementwise import aligned, wrap
from .exchange import Cut
from .rows import Rows, gathered, register

aten = torch.ops.aten


def _viewed(rows: Rows, local: Tensor, cut: Cut, strides: Sequence[int] | None = None) -> Rows:
    shares = local._is_view() or local.data_ptr() == rows.local.data_ptr()
    return Rows(local, cut, strides, rows.home if shares else None)


def same(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The same elements."""
    rows: Rows = args[0]
    assert rows.cut is not None
    found = Rows(op(rows.local), rows.cut, rows.stride(), rows.home)
    found.known = rows.known
    return found


def reshaped(shape: Sequence[int], cut: Cut, target: Sequence[int]) -> Cut | None:
    """The cut of a view of another shape: that of the finest dimension of which each rank still has whole elements."""
    before, inner = prod(shape[: cut.dim]), prod(shape[cut.dim + 1 :])
    found: list[Cut] = []
    for dim in range(len(target)) if prod(shape) else ():
        behind = prod(target[dim + 1 :])
        if before == prod(target[:dim]) and all(size * inner % behind == 0 for size in cut.sizes):
            found.append(Cut(dim, tuple(size * inner // behind for size in cut.sizes), cut.exchange))
    return max(found, key=lambda one: one.length) if found else None


def view(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Another shape."""
    rows: Rows = args[0]
    assert rows.cut is not None
    target = list(args[1])
    if -1 in target:
        target[target.index(-1)] = rows.numel() // max(1, -prod(target))
    cut = reshaped(rows.shape, rows.cut, target)
    if cut is None:
        return NotImplemented
    return _viewed(rows, rows.local.reshape(cut.own_shape(target)), cut)


def permute(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Another order of dimensions."""
    rows: Rows = args[0]
    assert rows.cut is not None
    places = _places(op, rows.dim(), args[1:])
    strides = [rows.stride(i) for i in places]
    return Rows(op(rows.local, *args[1:]), rows.cut.at(places.index(rows.cut.dim)), strides, rows.home)


def _places(op: Any, num: int, args: Sequence[Any]) -> list[int]:
    places = list(range(num))
    if op is aten.permute.default:
        return [dim % num for dim in args[0]]
    first, second = args if args else (0, num - 1)
    if num:
        places[first % num], places[second % num] = places[second % num], places[first % num]
    return places


def unsqueeze(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """One dimension more."""
    rows, dim = args
    dim %= rows.dim() + 1
    strides = list(rows.stride())
    strides.insert(dim, rows.shape[dim] * strides[dim] if dim < rows.dim() else 1)
    return Rows(op(rows.local, dim), rows.cut.at(rows.cut.dim + (dim <= rows.cut.dim)), strides, rows.home)


def squeeze(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Without dimensions of one element."""
    rows: Rows = args[0]
    assert rows.cut is not None
    dims = args[1] if len(args) > 1 else range(rows.dim())
    given = {dim % max(1, rows.dim()) for dim in (dims if isinstance(dims, (list, tuple, range)) else [dims])}
    gone = {dim for dim in given if rows.shape[dim] == 1}
    if rows.cut.dim in gone:
        return NotImplemented
    strides = [stride for dim, stride in enumerate(rows.stride()) if dim not in gone]
    shape = [size for dim, size in enumerate(rows.local.shape) if dim not in gone]
    local = rows.local.squeeze(tuple(gone)) if gone else rows.local.view(shape)
    return Rows(local, rows.cut.at(rows.cut.dim - sum(dim < rows.cut.dim for dim in gone)), strides, rows.home)


def expand(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Repeat dimensions of one element."""
    rows, sizes = args[:2]
    dim = rows.cut.dim + len(sizes) - rows.dim()
    if sizes[dim] not in (-1, rows.cut.length):
        return NotImplemented
    cut = rows.cut.at(dim)
    sizes = [rows.shape[i - len(sizes) + rows.dim()] if size == -1 else size for i, size in enumerate(sizes)]
    strides = [0] * (len(sizes) - rows.dim()) + list(rows.stride())
    shape = [1] * (len(sizes) - rows.dim()) + list(rows.shape)
    strides = [stride if one == size else 0 for stride, one, size in zip(strides, shape, sizes, strict=True)]
    return Rows(op(rows.local, cut.own_shape(sizes), **kwargs), cut, strides, rows.home)


def _slice(rows: Rows, dim: int, start: int, end: int, step: int = 1) -> Rows | None:
    """Elements from `start` to `end` of a dimension."""
    cut = rows.cut
    assert cut is not None
    strides = list(rows.stride())
    strides[dim] *= step
    if dim != cut.dim:
        local = aten.slice.Tensor(rows.local, dim, start, end, step)
        return Rows(local, cut, strides, rows.home)
    if (start, end, step) != (0, cut.length, 1):
        return None
    return Rows(rows.local, cut, strides, rows.home)


def slice_(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A range of a dimension."""
    rows: Rows = args[0]
    dim: Any
    dim, start, end, step = (*args[1:], *(0, None, None, 1)[len(args) - 1 :])
    dim %= rows.dim()
    length = rows.shape[dim]
    start, end, step = slice(start, end, step).indices(length)
    return NotImplemented if (found := _slice(rows, dim, start, max(start, end), step)) is None else found


def select(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """One element of a dimension that is not cut."""
    rows, dim, index = args
    dim %= rows.dim()
    if dim == rows.cut.dim:
        return NotImplemented
    strides = [*rows.stride()[:dim], *rows.stride()[dim + 1 :]]
    return Rows(op(rows.local, dim, index), rows.cut.at(rows.cut.dim - (dim < rows.cut.dim)), strides, rows.home)


def unbind(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """All elements of a dimension that is not cut."""
    rows, dim = args[0], (args[1] if len(args) > 1 else 0) % args[0].dim()
    if dim == rows.cut.dim:
        return NotImplemented
    cut, strides = rows.cut.at(rows.cut.dim - (dim < rows.cut.dim)), [*rows.stride()[:dim], *rows.stride()[dim + 1 :]]
    return [Rows(local, cut, strides, rows.home) for local in op(rows.local, dim)]


def split(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Ranges of a dimension, one after the other."""
    rows, sizes = args[:2]
    dim = (args[2] if len(args) > 2 else 0) % rows.dim()
    length = rows.shape[dim]
    if not isinstance(sizes, (list, tuple)):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)] if sizes else [0]
    start, found = 0, list[Any]()
    for size in sizes:
        found.append(_slice(rows, dim, start, start + size))
        start += size
    return NotImplemented if None in found else found


def cat(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Join along a dimension that is not cut."""
    tensors = [one for one in args[0] if one.dim() != 1 or one.numel()]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % max(1, tensors[0].dim())
    lead = next((one for one in tensors if type(one) is Rows and one.cut is not None), None)
    if lead is None or lead.cut is None or dim == lead.cut.dim:
        return NotImplemented
    return wrap(op([aligned(one, lead.cut) for one in tensors], dim), lead.cut)


def stack(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Join along a dimension of its own."""
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % (args[0][0].dim() + 1)
    return aten.cat.default([aten.unsqueeze.default(one, dim) for one in args[0]], dim)


def index(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Elements of a whole tensor by indices that are cut, or of rows at other dimensions."""
    source, indices = args
    if any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in indices):
        return NotImplemented
    if type(source) is Rows and source.cut is not None:
        places = [i for i, one in enumerate(indices) if one is not None]
        if len(places) != 1 or places[0] == source.cut.dim:
            return NotImplemented
        dim = source.cut.dim + (indices[places[0]].dim() - 1 if places[0] < source.cut.dim else 0)
        return wrap(op(source.local, [gathered(one) for one in indices]), source.cut.at(dim))
    if any(one is None for one in indices):
        return NotImplemented
    lead: Any = max((one for one in indices if type(one) is Rows and one.cut is not None), key=lambda one: one.dim())
    place = lead.cut.dim - lead.dim()
    if any(one.dim() + place < 0 or one.shape[place] != lead.cut.length for one in indices):
        return NotImplemented
    parts = [aligned(one, lead.cut.at(one.dim() + place)) for one in indices]
    dim = max(one.dim() for one in indices) + place
    return wrap(op(gathered(source), parts), lead.cut.at(dim))


_RULES: dict[str, Any] = {
    "alias detach lift_fresh": same,
    "view _unsafe_view reshape _reshape_alias": view,
    "permute transpose.int t": permute,
    "unsqueeze": unsqueeze,
    "squeeze squeeze.dim squeeze.dims": squeeze,
    "expand": expand,
    "slice.Tensor": slice_,
    "select.int": select,
    "unbind.int": unbind,
    "split.Tensor split_with_sizes": split,
    "cat": cat,
    "stack": stack,
    "index.Tensor": index,
}
for names, rule in _RULES.items():
    register(names, rule)
