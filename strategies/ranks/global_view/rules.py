"""Rules of operations on rows: element by element, along dimensions, views, products, torch's own decompositions."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table

from .rows import Cut, Rows, Rule, flat, gathered, is_cut, summed_over_ranks, written

aten = torch.ops.aten


def wrap(result: Any, cut: Cut, strides: Sequence[int] | None = None) -> Any:
    """Make rows of what an operation has returned."""
    if isinstance(result, (list, tuple)):
        return tuple(wrap(one, cut, strides) for one in result)
    return Rows(result, cut, strides) if isinstance(result, Tensor) else result


def aligned(value: Any, cut: Cut, place: int) -> Any:
    """This rank's part of a value: all, unless its dimension `place`, from the last, has the length of the cut one."""
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
    """Compute an operation along `dims` of this rank's parts: of `lead`, and by its place, from the last, of others."""
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
    total = summed_over_ranks(rows.local.sum(dims, bool(named.get("keepdim")), dtype=wide))
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


ELEMENTWISE: Mapping[str, Rule] = {
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


def reshaped(shape: Sequence[int], cut: Cut, target: Sequence[int]) -> Cut | None:
    """The cut of a view of another shape: that of the finest dimension of which each rank still has whole elements."""
    before, inner = prod(shape[: cut.dim]), prod(shape[cut.dim + 1 :])
    found: list[Cut] = []
    for dim in range(len(target)) if prod(shape) else ():
        behind = prod(target[dim + 1 :])
        if before == prod(target[:dim]) and all(size * inner % behind == 0 for size in cut.sizes):
            found.append(Cut(dim, tuple(size * inner // behind for size in cut.sizes), cut.rank))
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
    """Where views have the cut dimension, told by its stride, with shapes and strides of all rows' views; or None."""
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


VIEWS: Mapping[str, Rule] = {
    "view _unsafe_view reshape _reshape_alias": view,
    """alias detach lift_fresh permute transpose.int t unsqueeze expand slice.Tensor select.int unbind.int
    split.Tensor""": viewed,
    "squeeze squeeze.dim squeeze.dims": squeeze,
    "split_with_sizes": split_with_sizes,
    "cat": cat,
    "stack": stack,
}


def by_names(text: str) -> Rule:
    """Make the rule of an operation that computes each element of some dimensions by itself, or sums over it.

    Args:
        text: names of the first dimensions of arguments and results, as in `torch.einsum`. Of an argument that lacks a
            name all is needed; results that lack it are sums.
    """
    inputs, outputs = (side.split(",") for side in text.split("->"))

    def rule(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        cut_ones = [(one, dims) for one, dims in zip(args, inputs, strict=False) if is_cut(one)]
        lead, dims = max(cut_ones, key=lambda one: one[0].numel(), default=(None, ""))
        if lead is None or lead.cut.dim >= len(dims):
            return NotImplemented
        cut, name = lead.cut, dims[lead.cut.dim]
        given = list[Any]()
        for one, dims in zip_longest(args, inputs[: len(args)], fillvalue=""):
            dim = dims.find(name)
            if dim < 0 or not isinstance(one, (Tensor, list)):
                given.append(gathered(one))
            elif isinstance(one, list):  # a shape
                given.append(cut.at(dim).own_shape(one))
            elif one.shape[dim : dim + 1] != (cut.length,):
                return NotImplemented
            else:
                given.append(aligned(one, cut.at(dim), dim - one.dim()))
        result = op(*given, **{key: gathered(one) for key, one in kwargs.items()})
        found = [
            one if one is None else wrap(one, cut.at(dims.index(name))) if name in dims else summed_over_ranks(one)
            for one, dims in zip(flat([result]), outputs, strict=True)
        ]
        return tuple(found) if isinstance(result, tuple) else found[0]

    return rule


def added(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A product that is added to a tensor."""
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    found = (aten.mm if op is aten.addmm.default else aten.bmm)(*args[1:])
    found = found if alpha == 1 else found * alpha
    return found if beta == 0 else found + (args[0] if beta == 1 else args[0] * beta)


def embedding_backward(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The gradient of a table, which may count how often each of its rows was read."""
    return NotImplemented if args[4] else by_names("abcdef,abcdef->")(op, args, kwargs)


def decomposed(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What torch itself composes of operations that have rules: losses, and normalisation."""
    return decomposition_table[op](*args, **kwargs)


PRODUCTS: Mapping[str, Rule] = {
    "mm": by_names("mk,kn->mn"),
    "bmm": by_names("bmk,bkn->bmn"),
    "addmm baddbmm": added,
    "embedding": by_names(",abcdef->abcdef"),
    "embedding_dense_backward": embedding_backward,
    "convolution": by_names("n->n"),
    "convolution_backward": by_names("n,n->n,,"),
    "max_pool2d_with_indices adaptive_max_pool2d": by_names("n->n,n"),
    "max_pool2d_with_indices_backward": by_names("n,n,,,,,,n->n"),
    "adaptive_max_pool2d_backward": by_names("n,n,n->n"),
    "avg_pool2d _adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d": by_names("n->n"),
    "avg_pool2d_backward _adaptive_avg_pool2d_backward": by_names("n,n->n"),
    "upsample_nearest2d_backward upsample_bilinear2d_backward": by_names("n,,n->n"),
    """nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss mse_loss_backward
    smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward binary_cross_entropy
    binary_cross_entropy_backward binary_cross_entropy_with_logits soft_margin_loss soft_margin_loss_backward
    log_sigmoid_forward native_layer_norm native_layer_norm_backward native_batch_norm native_batch_norm_backward
    cudnn_batch_norm cudnn_batch_norm_backward native_group_norm native_group_norm_backward std.correction
    std_mean.correction mv dot addmv count_nonzero.dim_IntList nansum aminmax norm.ScalarOpt_dim""": decomposed,
}
