"""Rules of sums over rows: reductions, products of matrices, layers and their gradients, normalisation by the batch."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from .elementwise import aligned, wrap
from .exchange import Cut
from .rows import RULES, Rows, gathered

aten = torch.ops.aten


def _named(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, those that are left out by their defaults."""
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    return {one.name: given.get(one.name, one.default_value) for one in op._schema.arguments}


def _dims(rows: Tensor, given: Any) -> list[int]:
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return list(range(rows.dim()))
    return sorted({dim % max(1, rows.dim()) for dim in (given if isinstance(given, (list, tuple)) else [given])})


def _kept(cut: Cut, dims: Sequence[int], keepdim: bool) -> Cut:
    return cut if keepdim else cut.at(cut.dim - sum(dim < cut.dim for dim in dims))


def along_others(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A reduction of dimensions that are not cut."""
    rows, named = args[0], _named(op, args, kwargs)
    dims, keepdim = _dims(rows, named.get("dim")), bool(named.get("keepdim", False))
    if rows.cut.dim in dims or (0 in rows.local.shape and 0 in [rows.shape[dim] for dim in dims]):
        return NotImplemented
    return wrap(op(rows.local, *args[1:], **kwargs), _kept(rows.cut, dims, keepdim))


def summed(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A sum, or a mean as the sum divided by the number of elements."""
    rows, named = args[0], _named(op, args, kwargs)
    dims, keepdim = _dims(rows, named.get("dim")), bool(named.get("keepdim", False))
    if rows.cut.dim not in dims:
        return along_others(op, args, kwargs)
    is_mean, dtype = op.overloadpacket in (aten.mean, aten.nanmean), named.get("dtype")
    wide = torch.float32 if (dtype or rows.dtype) in (torch.float16, torch.bfloat16) else dtype
    total = rows.cut.exchange.sum(rows.local.sum(dims, keepdim, dtype=wide))
    if is_mean:
        total /= prod(rows.shape[dim] for dim in dims)
    return total if wide is dtype else total.to(dtype or rows.dtype)


def combined(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A reduction whose results of parts are reduced in the same way: extremes, products, norms."""
    rows, named = args[0], _named(op, args, kwargs)
    if "ord" in named and named["ord"] == 0:
        return NotImplemented
    dims, keepdim = _dims(rows, named.get("dim")), bool(named.get("keepdim", False))
    if rows.cut.dim not in dims:
        return along_others(op, args, kwargs)
    if not rows.numel():
        return NotImplemented
    packet = {aten.max: aten.amax, aten.min: aten.amin}.get(op.overloadpacket, op.overloadpacket)
    if packet is aten.prod:
        return NotImplemented
    extra = [named["ord"]] if "ord" in named else []
    options = {"dtype": named["dtype"]} if named.get("dtype") is not None else {}
    several: Any = getattr(packet, "dims", None) if "dims" in packet.overloads() else packet
    cut, local = rows.cut, rows.local
    if local.shape[cut.dim]:
        part = several(local, *extra, dims, True, **options)
    else:
        shape = [0 if dim == cut.dim else 1 if dim in dims else size for dim, size in enumerate(rows.shape)]
        part = several(local.new_ones([1] * rows.dim()), *extra, dims, True, **options).new_empty(shape)
    whole = cut.exchange.gather(part, Cut(cut.dim, tuple(int(size > 0) for size in cut.sizes), cut.exchange))
    return several(whole, *extra, dims, keepdim)


def deviation(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A variance or standard deviation, from the mean of all rows."""
    rows, named = args[0], _named(op, args, kwargs)
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


def by_rows(rows: str, results: str, counts: Sequence[int] = (), size: int | None = None) -> Callable[..., Any]:
    """Make the rule of an operation that computes each row of dimension 0 by itself.

    Args:
        rows: places of the tensors that have rows; all others are whole.
        results: a letter for each result: `r` has rows, `s` is a sum over rows, `w` is the same for any rows.
        counts: places of numbers of rows.
        size: place of a shape that begins with the number of rows.
    """
    places = [int(place, 16) for place in rows]

    def rule(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        lead = next((args[i] for i in places if i < len(args) and type(args[i]) is Rows and args[i].cut), None)
        if lead is None or lead.cut.dim or lead.cut.outer > 1:
            return NotImplemented
        cut: Cut = lead.cut
        for i in places:
            if i < len(args) and isinstance(args[i], Tensor) and args[i].shape[:1] != (cut.length,):
                return NotImplemented
        given = [
            aligned(one, cut) if i in places else cut.own_length if i in counts else gathered(one)
            for i, one in enumerate(args)
        ]
        if size is not None:
            given[size] = cut.own_shape(given[size])
        result = op(*given, **{name: gathered(one) for name, one in kwargs.items()})
        kinds = results if isinstance(result, (list, tuple)) else results[0]
        found = [
            None if one is None else wrap(one, cut) if kind == "r" else cut.exchange.sum(one) if kind == "s" else one
            for one, kind in zip(result if len(kinds) > 1 else [result], kinds, strict=True)
        ]
        return tuple(found) if len(kinds) > 1 else found[0]

    return rule


def layer_norm(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Normalisation over the last dimensions."""
    rows, shape = args[0], args[1]
    if type(rows) is not Rows or rows.cut is None or rows.cut.dim >= rows.dim() - len(shape):
        return NotImplemented
    return wrap(op(rows.local, shape, *map(gathered, args[2:4]), *args[4:]), rows.cut)


def layer_norm_backward(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Its gradients."""
    gradient, rows, shape, mean, rstd, weight, bias, mask = args
    if type(rows) is not Rows or rows.cut is None or rows.cut.dim >= rows.dim() - len(shape):
        return NotImplemented
    cut = rows.cut
    parts = [aligned(one, cut) for one in (gradient, rows)]
    own = op(*parts, shape, aligned(mean, cut), aligned(rstd, cut), gathered(weight), gathered(bias), mask)
    return tuple(
        None if one is None or not asked else wrap(one, cut) if i == 0 else cut.exchange.sum(one)
        for i, (one, asked) in enumerate(zip(own, mask, strict=True))
    )


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


def batch_norm(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Normalisation by the statistics of all rows, which the running ones take part in."""
    (x, weight, bias), (mean, variance, training, momentum, eps) = args[:3], args[3:8]
    if type(x) is not Rows or x.cut is None or x.cut.dim or x.cut.outer > 1:
        return NotImplemented
    if not training:
        own = op(x.local, *args[1:])
        return (wrap(own[0], x.cut), *own[1:])
    dims, num, shape = [dim for dim in range(x.dim()) if dim != 1], x.numel() // x.shape[1], [1, -1] + [1] * (x.dim() - 2)
    wide = x.local.float() if x.dtype in (torch.float16, torch.bfloat16) else x.local
    center = x.cut.exchange.sum(wide.sum(dims)) / num
    centered = wide - center.view(shape)
    spread = x.cut.exchange.sum(centered.square().sum(dims)) / num
    inverse = (spread + eps).rsqrt()
    result = centered * inverse.view(shape)
    if weight is not None:
        result = result * weight.view(shape)
    if bias is not None:
        result = result + bias.view(shape)
    if mean is not None:
        mean.lerp_(center.to(mean), momentum)
    if variance is not None:
        variance.lerp_((spread * (num / (num - 1))).to(variance), momentum)
    found = (wrap(result.to(x.dtype), x.cut), center, inverse)
    if len(op._schema.returns) == 4:  # what cuDNN keeps beside them
        return (*found, x.local.new_empty(0, dtype=torch.uint8))
    return found


def batch_norm_backward(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Its gradients."""
    named = _named(op, args, kwargs)
    x, gradient = named["input"], named.get("grad_out", named.get("grad_output"))
    lead = x if type(x) is Rows and x.cut is not None else gradient
    if lead.cut.dim or lead.cut.outer > 1:
        return NotImplemented
    cut, dims, shape = lead.cut, [dim for dim in range(x.dim()) if dim != 1], [1, -1] + [1] * (x.dim() - 2)
    given, own = aligned(gradient, cut), aligned(x, cut)
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    given, own, num = given.to(wide), own.to(wide), x.numel() // x.shape[1]
    training = named.get("train", named.get("training", True))
    mask = named.get("output_mask", [True] * 3)
    mean, inverse = named.get("save_mean"), named.get("save_invstd", named.get("save_var"))
    if not training:
        mean, inverse = named["running_mean"], (named["running_var"] + named.get("eps", named.get("epsilon"))).rsqrt()
    normal = (own - mean.view(shape)) * inverse.view(shape)
    of_bias, of_weight = cut.exchange.sum(torch.stack([given.sum(dims), (given * normal).sum(dims)]))
    scale = inverse if named["weight"] is None else inverse * named["weight"]
    if training:
        given = given - of_bias.view(shape) / num - normal * (of_weight.view(shape) / num)
    found = wrap((given * scale.view(shape)).to(x.dtype), cut)
    return found if mask[0] else None, of_weight if mask[1] else None, of_bias if mask[2] else None


def _register() -> None:
    rules: dict[str, Any] = {
        "sum sum.dim_IntList mean mean.dim": summed,
        "amax amin max min any any.dim any.dims all all.dim all.dims linalg_vector_norm": combined,
        "var.correction std.correction var_mean.correction std_mean.correction": deviation,
        "max.dim min.dim argmax argmin prod.dim_int logsumexp median.dim kthvalue mode nanmedian.dim nansum": along_others,
        "mm": product("mk,kn", "mn"),
        "bmm": product("bmk,bkn", "bmn"),
        "mv": product("mk,k", "m"),
        "dot": product("k,k", ""),
        "addmm": added(aten.mm.default),
        "addmv": added(aten.mv.default),
        "baddbmm": added(aten.bmm.default),
        "native_layer_norm": layer_norm,
        "native_layer_norm_backward": layer_norm_backward,
        "embedding": embedding,
        "embedding_dense_backward": embedding_backward,
        "native_batch_norm cudnn_batch_norm miopen_batch_norm": batch_norm,
        "native_batch_norm_backward cudnn_batch_norm_backward miopen_batch_norm_backward": batch_norm_backward,
        "native_group_norm": by_rows("0", "rrr", counts=[3]),
        "native_group_norm_backward": by_rows("0123", "rss", counts=[5]),
        "convolution": by_rows("0", "r"),
        "convolution_backward": by_rows("01", "rss"),
        "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d": by_rows("0", "rr"),
        "max_pool2d_with_indices_backward": by_rows("017", "r"),
        "max_pool3d_with_indices_backward": by_rows("017", "r"),
        "adaptive_max_pool2d_backward adaptive_max_pool3d_backward": by_rows("012", "r"),
        "avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d": by_rows("0", "r"),
        "avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward": by_rows(
            "01", "r"
        ),
        "upsample_nearest1d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d upsample_linear1d": by_rows(
            "0", "r"
        ),
        "upsample_nearest1d_backward upsample_nearest2d_backward upsample_bilinear2d_backward "
        "upsample_bicubic2d_backward upsample_linear1d_backward": by_rows("0", "r", size=2),
        "reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d": by_rows("0", "r"),
        "reflection_pad1d_backward reflection_pad2d_backward replication_pad1d_backward "
        "replication_pad2d_backward": by_rows("01", "r"),
        "grid_sampler_2d": by_rows("01", "r"),
        "grid_sampler_2d_backward": by_rows("012", "rr"),
        "pixel_shuffle pixel_unshuffle": by_rows("0", "r"),
        "im2col col2im": by_rows("0", "r"),
    }
    for names, rule in rules.items():
        for name in names.split():
            packet, _, overload = name.partition(".")
            RULES[getattr(getattr(aten, packet), overload or "default")] = rule


_register()
