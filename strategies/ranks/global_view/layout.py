"""Rules of views, and of joining and choosing."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch

from .elementwise import aligned, wrap
from .exchange import Cut
from .rows import Rows, Rule, flat, is_cut

aten = torch.ops.aten


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
    target = op(torch.empty(rows.shape, device="meta"), *args[1:]).shape
    cut = reshaped(rows.shape, rows.cut, target)
    if cut is None:
        return NotImplemented
    local = rows.local.reshape(cut.own_shape(target))
    shares = local._is_view() or local.data_ptr() == rows.local.data_ptr()
    known = None if rows.known is None or not shares else op(rows.known, *args[1:])
    return Rows(local, cut, None, rows.home if shares else None, known)


@lru_cache(4096)
def _places(op: Any, rows: tuple[Any, ...], strides: tuple[int, ...], cut_dim: int, args: tuple[Any, ...]) -> Any:
    """Where views have the cut dimension, which torch tells by its stride, and shapes and strides of all rows' views.

    Returns:
        A list of tuples (dimension, shape, strides), or None if a view has a part of the cut dimension at most.
    """
    mark = [int(dim == cut_dim) for dim in range(len(rows))]
    whole, marked = (flat([op(torch.empty_strided(rows, one, device="meta"), *args)]) for one in (strides, mark))
    found = list[Any]()
    for view, mark in zip(whole, marked, strict=True):
        dims = [dim for dim in range(view.dim()) if mark.stride(dim) == 1 and view.shape[dim] == rows[cut_dim]]
        if not dims:
            return None
        found.append((dims[0], view.shape, view.stride()))
    return found


def viewed(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Views in which the cut dimension is whole, and where it is."""
    rows, *others = args
    given = tuple(tuple(one) if isinstance(one, list) else one for one in others)
    places = _places(op, rows.shape, rows.stride(), rows.cut.dim, given)
    if places is None:
        return NotImplemented
    own = (rows.cut.at(places[0][0]).own_shape(places[0][1]),) if op is aten.expand.default else given
    parts = op(rows.local, *own, **kwargs)
    wholes = [None] * len(places) if rows.known is None else flat([op(rows.known, *given, **kwargs)])
    each = zip(flat([parts]), places, wholes, strict=True)
    found = [Rows(part, rows.cut.at(dim), strides, rows.home, whole) for part, (dim, _, strides), whole in each]
    return found if isinstance(parts, (list, tuple)) else found[0]


def squeeze(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Without dimensions that have one element; a rank's part of the cut one may have one, too."""
    rows, dims = args[0], args[1] if len(args) > 1 else range(args[0].dim())
    given = (dim % rows.dim() for dim in (dims if isinstance(dims, Sequence) else [dims]))
    return viewed(aten.squeeze.dims, (rows, [dim for dim in given if rows.shape[dim] == 1]), kwargs)


def split_with_sizes(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Ranges of a dimension; a single one is longer than a rank's part."""
    return viewed(op, args, kwargs) if len(args[1]) > 1 else NotImplemented


def cat(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Join along a dimension that is not cut."""
    tensors = [one for one in args[0] if one.dim() != 1 or one.numel()]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % max(1, tensors[0].dim())
    lead = next(filter(is_cut, tensors), None)
    if lead is None or dim == lead.cut.dim:
        return NotImplemented
    return wrap(op([aligned(one, lead.cut, lead.cut.dim - lead.dim()) for one in tensors], dim), lead.cut)


def stack(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Join along a dimension of its own."""
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % (args[0][0].dim() + 1)
    return aten.cat.default([aten.unsqueeze.default(one, dim) for one in args[0]], dim)


RULES: Mapping[str, Rule] = {
    "view _unsafe_view reshape _reshape_alias": view,
    """alias detach lift_fresh permute transpose.int t unsqueeze expand slice.Tensor select.int unbind.int
    split.Tensor""": viewed,
    "squeeze squeeze.dim squeeze.dims": squeeze,
    "split_with_sizes": split_with_sizes,
    "cat": cat,
    "stack": stack,
}
