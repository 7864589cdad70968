"""Rules of operations that compute every element, or every row, by itself."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .exchange import Cut
from .rows import RULES, Rows, facts, gathered, register

aten = torch.ops.aten


def wrap(result: Any, cut: Cut, strides: Sequence[int] | None = None) -> Any:
    """Make rows of what an operation has returned."""
    if isinstance(result, (list, tuple)):
        return tuple(wrap(one, cut, strides) for one in result)
    return Rows(result, cut, strides) if isinstance(result, Tensor) else result


def aligned(value: Any, cut: Cut) -> Any:
    """This rank's part of a tensor of the whole's shape."""
    if type(value) is Rows and value.cut == cut:
        return value.local
    return cut.own(gathered(value)) if isinstance(value, Tensor) else value


def named_of(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, those that are left out by their defaults."""
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    return {one.name: given.get(one.name, one.default_value) for one in op._schema.arguments}


def dense(strides: Sequence[int]) -> Sequence[int] | None:
    """Strides of what is computed element by element; None if they are a contiguous tensor's."""
    return None if 0 in strides else strides


def pointwise(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Elements of equal places, by broadcasting."""
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
    written = args[0] if facts(op).written else None
    if written is not None:
        lead: Any = written
        if facts(op).written != (0,) or type(lead) is not Rows or lead.cut is None:
            return NotImplemented
    else:
        cut_ones = [one for one in tensors if type(one) is Rows and one.cut is not None]
        lead = max(cut_ones, key=lambda one: (one.dim(), one.numel()))
    cut: Any = lead.cut
    place = cut.dim - lead.dim()

    def part(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        if one.dim() + place < 0 or (one.shape[place] == 1 and cut.length != 1):
            return gathered(one)
        return aligned(one, cut.at(one.dim() + place))

    if any(one.dim() + place >= 0 and one.shape[place] not in (1, cut.length) for one in tensors):
        return NotImplemented  # only where the rows themselves are broadcast
    result = op(*map(part, args), **{name: part(value) for name, value in kwargs.items()})
    if written is not None:
        written.home.writes += 1
        return written
    first = result[0] if isinstance(result, (list, tuple)) else result
    full = first.dim() == lead.dim() and first.shape == lead.local.shape
    return wrap(result, cut.at(first.dim() + place), dense(lead.stride()) if full else None)


def like(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """New tensors of the shape of rows."""
    rows: Rows = args[0]
    if type(rows) is not Rows or rows.cut is None:
        return NotImplemented
    return wrap(op(rows.local, *args[1:], **kwargs), rows.cut, dense(rows.stride()))


def drawn(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Random numbers of the shape of rows: all are drawn, as one device does, and this rank's are kept."""
    rows: Rows = args[0]
    if type(rows) is not Rows or rows.cut is None or any(isinstance(one, Tensor) for one in args[1:]):
        return NotImplemented
    strides = dense(rows.stride())
    whole = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    if strides is not None:
        whole = torch.empty_strided(rows.shape, strides, dtype=rows.dtype, device=rows.device)
    result = op(whole, *args[1:], **kwargs)
    if facts(op).written:
        rows.local.copy_(rows.cut.own(result))
        rows.home.writes += 1
        return rows
    return wrap(rows.cut.own(result).clone(), rows.cut, strides)


def along(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Tensors of one number of dimensions, along dimensions that are not cut: softmax, sorting, cumulated sums."""
    named = named_of(op, args, kwargs)
    tensors = [one for one in named.values() if isinstance(one, Tensor)]
    lead: Any = next(one for one in tensors if type(one) is Rows and one.cut is not None)
    cut: Cut = lead.cut
    given = named["dim"] if "dim" in named else named["dims"]
    dims = {dim % max(1, lead.dim()) for dim in (given if isinstance(given, (list, tuple)) else [given])}
    if (
        not dims
        or cut.dim in dims
        or any(one.dim() != lead.dim() or one.shape[cut.dim] != cut.length for one in tensors)
    ):
        return NotImplemented
    written = facts(op).written
    if written and type(args[0]) is not Rows:
        return NotImplemented
    if written and (args[0].cut is None or args[0].cut != cut):
        return NotImplemented
    result = op(*(aligned(one, cut) for one in args), **{name: aligned(one, cut) for name, one in kwargs.items()})
    if written:
        args[0].home.writes += 1
        return args[0]
    return wrap(result, cut)


def _register() -> None:
    skipped = {aten.equal.default, aten.allclose.default}
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            op = getattr(packet, overload)
            if (
                torch.Tag.pointwise in op.tags
                and torch.Tag.nondeterministic_seeded not in op.tags
                and op not in skipped
            ):
                RULES.setdefault(op, pointwise)
    register(
        """_to_copy copy_ copy fill_.Scalar fill_.Tensor fill.Scalar zero_ masked_fill_.Scalar masked_fill_.Tensor
        masked_fill.Scalar masked_fill.Tensor where.self lerp_.Scalar lerp_.Tensor elu_backward
        softplus_backward hardtanh_backward hardswish hardswish_ hardswish_backward hardsigmoid_backward
        leaky_relu_backward mish_backward softshrink_backward hardshrink_backward log_sigmoid_backward _conj
        _neg_view logical_and_ clamp.Tensor clamp_.Tensor bitwise_not special_i0e _prelu_kernel addcmul addcdiv""",
        pointwise,
    )
    register("empty_like zeros_like ones_like full_like", like)
    register(
        """rand_like randn_like randint_like.default randint_like.low_dtype bernoulli_.float uniform_ normal_
        exponential_ geometric_ log_normal_ cauchy_ random_.default random_.from random_.to""",
        drawn,
    )
    register(
        """_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data cumsum cumprod logcumsumexp
        cummax cummin sort sort.stable argsort.stable topk gather scatter.src scatter.value scatter_.src
        scatter_.value scatter_add scatter_add_ flip roll glu glu_backward""",
        along,
    )


_register()
