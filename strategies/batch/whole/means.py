"""Compute a mean that names its normaliser, so that parts of a batch can be combined to the batch's mean."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from typing_extensions import override


class EvenerMean(torch.autograd.Function):
    """The sum of weighted values, divided by `normaliser`, which the graph's node keeps as an attribute."""

    @staticmethod
    @override
    def forward(ctx: Any, values: Tensor, weight: Tensor | None, normaliser: Tensor | float) -> Tensor:
        ctx.normaliser, ctx.shape, ctx.dtype = normaliser, values.shape, values.dtype
        # values with weight 0 count for nothing, be they nan
        counted = values if weight is None else torch.where(weight == 0, 0.0, values * weight)
        precise = torch.promote_types(counted.dtype, torch.float32)
        divisor = torch.as_tensor(normaliser, dtype=precise, device=values.device)
        factor = torch.where(divisor == 0, 0.0, 1 / divisor)
        ctx.save_for_backward(factor if weight is None else weight.to(precise) * factor)
        return (counted.sum(dtype=precise) * factor).to(counted.dtype)

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (factor,) = ctx.saved_tensors
        return (grad_outputs[0] * factor).expand(ctx.shape).to(ctx.dtype), None, None


def mean(values: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute a mean whose parts make the global batch's, whatever it divides by.

    `(values * weight).sum() / weight.sum()` divides by another number on each part of a batch. A mean computed here
    tells by what, so that a sum of such means, each times a constant, has the value and the gradients of one device.

    Args:
        values: of any shape.
        weight: of a shape that broadcasts to that of `values`: a mask, counts, weights of classes. It must not require
            a gradient.

    Returns:
        The mean, of shape (); 0 where the weights sum to 0, or there are no values.

    Raises:
        ValueError: `weight` requires a gradient, or has a shape that does not broadcast to that of `values`.

    Example:
        >>> loss = evener.mean(F.cross_entropy(logits, labels, reduction="none"), weight=labels != -100)
    """
    return _mean(values, weight)


def _computed(values: Tensor, weight: Tensor | None) -> Tensor:
    if has_torch_function((values, weight)):
        return handle_torch_function(mean, (values, weight), values, weight=weight)
    if not values.is_floating_point():
        values = values.to(torch.get_default_dtype())
    if weight is None:
        return _apply(values, None, float(values.numel()))
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "evener.mean: weight requires a gradient, but a mean's weights must be constants. Pass weight.detach(), or "
            "return the sum of products and divide it by a constant."
        )
    dtype = torch.promote_types(values.dtype, weight.dtype)
    try:
        weight = weight.to(values.device, dtype).expand(values.shape)
    except RuntimeError as exc:
        raise ValueError(
            f"evener.mean: weight has shape {tuple(weight.shape)}, which does not broadcast to that of values, "
            f"{tuple(values.shape)}. Give one weight per value, or per row with trailing dimensions of 1."
        ) from exc
    return _apply(values, weight, weight.sum(dtype=torch.promote_types(dtype, torch.float32)))


_mean: Any = torch.compiler.disable(_computed)  # the node stays in the graph of a compiled loss


def _apply(values: Tensor, weight: Tensor | None, normaliser: Tensor | float) -> Tensor:
    return EvenerMean.apply(values, weight, normaliser)  # pyright: ignore[reportReturnType]  # untyped in torch
