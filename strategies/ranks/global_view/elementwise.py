"""Rules of operations that compute every element, or every row, by itself."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from .exchange import Cut
from .rows import Rows, Rule, gathered, is_cut, written

aten = torch.ops.aten


def wrap(result: Any, cut: Cut, strides: Sequence[int] | None = None) -> Any:
    """Make rows of what an operation has returned."""
    if isinstance(result, (list, tuple)):
        return tuple(wrap(one, cut, strides) for one in result)
    return Rows(result, cut, strides) if isinstance(result, Tensor) else result


def aligned(value: Any, cut: Cut, place: int) -> Any:
    """This rank's part of a value: all of it, unless its dimension `place` has the length of the cut one.

    Args:
        place: counted from the last dimension, as -1.
    """
    dim = value.dim() + place if isinstance(value, Tensor) else -1
    if dim < 0 or value.shape[dim] != cut.length:
        return gathered(value)
    if type(value) is Rows and value.cut == cut.at(dim):
        return value.local
    return cut.at(dim).own(gathered(value))


def named_of(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, those that are left out by their defaults."""
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    return {one.name: given.get(one.name, one.default_value) for one in op._schema.arguments}


def dims_of(rows: Tensor, named: dict[str, Any]) -> list[int]:
    """The dimensions along which an operation computes: all if none are given."""
    given = named.get("dim", named.get("dims"))
    if given is None or given in ((), []):
        return list(range(rows.dim()))
    return sorted({dim % max(1, rows.dim()) for dim in (given if isinstance(given, (list, tuple)) else [given])})


def by_parts(op: Any, args: Sequence[Any], kwargs: dict[str, Any], lead: Any, dims: Sequence[int] = ()) -> Any:
    """Compute an operation of this rank's parts of its tensors.

    Args:
        lead: the tensor whose cut it is; of others the dimension at its place, from the last, is cut.
        dims: along which it computes.
    """
    cut: Cut = lead.cut
    places, place = written(op), cut.dim - lead.dim()
    if places and not (places == (0,) and is_cut(args[0]) and args[0].cut == cut):
        return NotImplemented
    given = {name: aligned(one, cut, place) for name, one in kwargs.items()}
    result = op(*(aligned(one, cut, place) for one in args), **given)
    if places:
        args[0].home.writes += 1
        return args[0]
    first = result[0] if isinstance(result, (list, tuple)) else result
    dim = cut.dim - sum(dim < cut.dim for dim in dims) if first.dim() < lead.dim() else first.dim() + place
    keeps_order = not dims and first.shape == lead.local.shape and 0 not in lead.stride()
    return wrap(result, cut.at(dim), lead.stride() if keeps_order else None)


def pointwise(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Elements of equal places, by broadcasting; new tensors of the same shape."""
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
    lead: Any = max(filter(is_cut, tensors), key=lambda one: (one.dim(), one.numel()))
    place = lead.cut.dim - lead.dim()
    if any(one.dim() + place >= 0 and one.shape[place] not in (1, lead.cut.length) for one in tensors):
        return NotImplemented  # only where the rows themselves are broadcast
    return by_parts(op, args, kwargs, lead)


def along(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Tensors of one number of dimensions, along dimensions that are not cut: softmax, sorting, reductions."""
    named = named_of(op, args, kwargs)
    tensors = [one for one in named.values() if isinstance(one, Tensor)]
    lead: Any = next(filter(is_cut, tensors))
    dims, cut = dims_of(lead, named), lead.cut
    if cut.dim in dims or any(one.dim() != lead.dim() or one.shape[cut.dim] != cut.length for one in tensors):
        return NotImplemented
    return by_parts(op, args, kwargs, lead, dims)


def summed(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A sum, or a mean as the sum divided by the number of elements."""
    rows, named = args[0], named_of(op, args, kwargs)
    dims, dtype = dims_of(rows, named), named.get("dtype")
    if rows.cut.dim not in dims:
        return along(op, args, kwargs)
    wide = torch.float32 if (dtype or rows.dtype) in (torch.float16, torch.bfloat16) else dtype
    total = rows.cut.exchange.sum(rows.local.sum(dims, bool(named.get("keepdim")), dtype=wide))
    if op.overloadpacket is aten.mean:
        total /= prod(rows.shape[dim] for dim in dims)
    return total if wide is dtype else total.to(dtype or rows.dtype)


def variance(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A variance, from the mean of all rows, with that mean or without."""
    rows, named = args[0], named_of(op, args, kwargs)
    dims, keepdim, correction = dims_of(rows, named), bool(named["keepdim"]), named["correction"]
    if rows.cut.dim not in dims:
        return along(op, args, kwargs)
    if rows.is_complex():
        return NotImplemented
    mean = aten.mean.dim(rows, dims, True)
    total = aten.sum.dim_IntList(aten.square.default(aten.sub.Tensor(rows, mean)), dims, keepdim)
    divisor = prod(rows.shape[dim] for dim in dims) - (1 if correction is None else correction)
    found = total / max(0.0, divisor)
    return found if op is aten.var.correction else (found, mean if keepdim else mean.squeeze(tuple(dims)))


def made(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A tensor of another shape, which all ranks make alike."""
    return op(args[0].local, *args[1:], **kwargs)


def drawn(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Random numbers of the shape of rows: all are drawn, as one device does, and this rank's are kept."""
    rows: Rows = args[0]
    if rows.cut is None or any(isinstance(one, Tensor) for one in args[1:]):
        return NotImplemented
    strided = torch.empty_strided(rows.shape, rows.stride(), dtype=rows.dtype, device="meta")
    whole = op(torch.empty_like(strided, device=rows.device), *args[1:], **kwargs)
    if not written(op):
        return wrap(rows.cut.own(whole).clone(), rows.cut, None if 0 in rows.stride() else rows.stride())
    rows.write(whole)
    return rows


def _tagged() -> Iterator[str]:
    """Operations that torch itself calls elementwise."""
    for name in dir(aten):
        for overload in getattr(getattr(aten, name), "overloads", list)():
            tags = getattr(getattr(aten, name), overload).tags
            if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags:
                yield f"{name}.{overload}"


RULES: Mapping[str, Rule] = {
    " ".join(set(_tagged()) - {"equal.default", "allclose.default"}): pointwise,
    """_to_copy copy_ copy fill_.Scalar fill_.Tensor fill.Scalar zero_ masked_fill_.Scalar masked_fill_.Tensor
    masked_fill.Scalar masked_fill.Tensor where.self lerp_.Scalar lerp_.Tensor elu_backward softplus_backward
    hardtanh_backward hardswish hardswish_ hardswish_backward hardsigmoid_backward leaky_relu_backward mish_backward
    softshrink_backward hardshrink_backward log_sigmoid_backward _conj _neg_view logical_and_ clamp.Tensor clamp_.Tensor
    bitwise_not special_i0e _prelu_kernel addcmul addcdiv empty_like zeros_like ones_like full_like""": pointwise,
    """_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data cumsum cumprod logcumsumexp cummax cummin
    sort sort.stable argsort.stable topk gather scatter.src scatter.value scatter_.src scatter_.value scatter_add
    scatter_add_ flip roll glu glu_backward amax amin any.dim any.dims all.dim all.dims max.dim min.dim argmax argmin
    logsumexp linalg_vector_norm""": along,
    "new_empty new_full new_ones new_zeros": made,
    "sum sum.dim_IntList mean mean.dim": summed,
    "var.correction var_mean.correction": variance,
    """rand_like randn_like randint_like.default randint_like.low_dtype bernoulli_.float uniform_ normal_ exponential_
    geometric_ log_normal_ cauchy_ random_.default random_.from random_.to""": drawn,
}
