"""Rules of sums over rows: reductions, products of matrices, layers and their gradients, normalisation by the batch."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from .elementwise import aligned, named_of, wrap
from .exchange import Cut
from .rows import Rows, gathered, register

aten = torch.ops.aten


def _dims(rows: Tensor, given: Any) -> list[int]:
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return list(range(rows.dim()))
    return sorted({dim % max(1, rows.dim()) for dim in (given if isinstance(given, (list, tuple)) else [given])})


def _kept(cut: Cut, dims: Sequence[int], keepdim: bool) -> Cut:
    return cut if keepdim else cut.at(cut.dim - sum(dim < cut.dim for dim in dims))


def along_others(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A reduction of dimensions that are not cut."""
    rows, named = args[0], named_of(op, args, kwargs)
    dims, keepdim = _dims(rows, named.get("dim")), bool(named.get("keepdim", False))
    if rows.cut.dim in dims or (0 in rows.local.shape and 0 in [rows.shape[dim] for dim in dims]):
        return NotImplemented
    return wrap(op(rows.local, *args[1:], **kwargs), _kept(rows.cut, dims, keepdim))


def summed(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A sum, or a mean as the sum divided by the number of elements."""
    rows, named = args[0], named_of(op, args, kwargs)
    dims, keepdim = _dims(rows, named.get("dim")), bool(named.get("keepdim", False))
    if rows.cut.dim not in dims:
        return along_others(op, args, kwargs)
    is_mean, dtype = op.overloadpacket in (aten.mean, aten.nanmean), named.get("dtype")
    wide = torch.float32 if (dtype or rows.dtype) in (torch.float16, torch.bfloat16) else dtype
    total = rows.cut.exchange.sum(rows.local.sum(dims, keepdim, dtype=wide))
    if is_mean:
        total /= prod(rows.shape[dim] for dim in dims)
    return total if wide is dtype else total.to(dtype or rows.dtype)


def deviation(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A variance or standard deviation, from the mean of all rows."""
    rows, named = args[0], named_of(op, args, kwargs)
    dims, keepdim = _dims(rows, named.get("dim")), bool(named.get("keepdim", False))
    if rows.cut.dim not in dims:
        return along_others(op, args, kwargs)
    if rows.is_complex():
        return NotImplemented
    correction = named.get("correction")
    mean = aten.mean.dim(rows, dims, True)
    total = aten.sum.dim_IntList(aten.square.default(aten.sub.Tensor(rows, mean)), dims, keepdim)
    divisor = max(0.0, prod(rows.shape[dim] for dim in dims) - (1 if correction is None else correction))
    found = total / divisor
    if op.overloadpacket in (aten.std, aten.std_mean):
        found = found.sqrt()
    if op.overloadpacket in (aten.var_mean, aten.std_mean):
        return found, mean if keepdim else mean.squeeze(tuple(dims))
    return found


def product(inputs: str, output: str) -> Callable[..., Any]:
    """Make the rule of a product of tensors.

    Args:
        inputs: names of the dimensions of each operand, as in `torch.einsum`, separated by commas.
        output: those of the result; over the others it sums.
    """
    names = inputs.split(",")

    def rule(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        cuts = [(i, one) for i, one in enumerate(args) if type(one) is Rows and one.cut is not None]
        lead = max(cuts, key=lambda one: one[1].numel())
        cut: Any = lead[1].cut
        label = names[lead[0]][cut.dim]
        parts = [
            aligned(one, cut.at(name.index(label))) if label in name else gathered(one)
            for one, name in zip(args, names, strict=True)
        ]
        result = op(*parts)
        return wrap(result, cut.at(output.index(label))) if label in output else cut.exchange.sum(result)

    return rule


def added(plain: Any) -> Callable[..., Any]:
    """Make the rule of a product that is added to a tensor."""

    def rule(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
        if kwargs.keys() - {"beta", "alpha"}:
            return NotImplemented
        found = plain(*args[1:])
        found = found if alpha == 1 else found * alpha
        return found if beta == 0 else args[0] * beta + found if beta != 1 else args[0] + found

    return rule


def by_rows(rows: str, results: str, size: int | None = None) -> Callable[..., Any]:
    """Make the rule of an operation that computes each row of dimension 0 by itself.

    Args:
        rows: places of the tensors that have rows; all others are whole.
        results: a letter for each result: `r` has rows, `s` is a sum over rows, `w` is the same for any rows.
        size: place of a shape that begins with the number of rows.
    """
    places = [int(place, 16) for place in rows]

    def rule(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        lead = next((args[i] for i in places if i < len(args) and type(args[i]) is Rows and args[i].cut), None)
        if lead is None or lead.cut.dim:
            return NotImplemented
        cut: Cut = lead.cut
        for i in places:
            if i < len(args) and isinstance(args[i], Tensor) and args[i].shape[:1] != (cut.length,):
                return NotImplemented
        given = [aligned(one, cut) if i in places else gathered(one) for i, one in enumerate(args)]
        if size is not None:
            given[size] = cut.own_shape(given[size])
        result: Any = op(*given, **{name: gathered(one) for name, one in kwargs.items()})
        kinds = results if isinstance(result, (list, tuple)) else results[0]
        parts: Sequence[Any] = result if len(kinds) > 1 else [result]
        found = [
            None if one is None else wrap(one, cut) if kind == "r" else cut.exchange.sum(one) if kind == "s" else one
            for one, kind in zip(parts, kinds, strict=True)
        ]
        return tuple(found) if len(kinds) > 1 else found[0]

    return rule


def embedding(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Rows of a table."""
    table, index = args[:2]
    if type(index) is not Rows or index.cut is None:
        return NotImplemented
    return wrap(op(gathered(table), index.local, *args[2:], **kwargs), index.cut)


def embedding_backward(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The table's gradient."""
    gradient, index = args[:2]
    lead: Any = index if type(index) is Rows and index.cut is not None else gradient
    if args[4] or lead.cut.dim >= index.dim():
        return NotImplemented
    cut: Cut = lead.cut
    return cut.exchange.sum(op(aligned(gradient, cut), aligned(index, cut), *args[2:]))


_RULES: dict[str, Any] = {
    "sum sum.dim_IntList mean mean.dim": summed,
    "var.correction std.correction var_mean.correction std_mean.correction": deviation,
    "amax amin any.dim any.dims all.dim all.dims max.dim min.dim argmax argmin logsumexp": along_others,
    "mm": product("mk,kn", "mn"),
    "bmm": product("bmk,bkn", "bmn"),
    "addmm": added(aten.mm.default),
    "baddbmm": added(aten.bmm.default),
    "embedding": embedding,
    "embedding_dense_backward": embedding_backward,
    "convolution": by_rows("0", "r"),
    "convolution_backward": by_rows("01", "rss"),
    "max_pool2d_with_indices adaptive_max_pool2d": by_rows("0", "rr"),
    "max_pool2d_with_indices_backward": by_rows("017", "r"),
    "adaptive_max_pool2d_backward": by_rows("012", "r"),
    "avg_pool2d _adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d": by_rows("0", "r"),
    "avg_pool2d_backward _adaptive_avg_pool2d_backward": by_rows("01", "r"),
    "upsample_nearest2d_backward upsample_bilinear2d_backward": by_rows("0", "r", size=2),
}
for names, rule in _RULES.items():
    register(names, rule)
