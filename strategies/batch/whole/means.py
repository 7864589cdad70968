"""Compute a mean that names what it divides by, so that parts of a batch can be combined to the batch's mean."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


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
    precise = torch.promote_types(values.dtype, torch.float32)
    if weight is None:
        return (values.sum(dtype=precise) / max(1, values.numel())).to(values.dtype)
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
    total = weight.sum(dtype=torch.promote_types(dtype, torch.float32))
    factor = torch.where(total == 0, 0.0, 1 / total)
    counted = torch.where(weight == 0, 0.0, values * weight)  # values with weight 0 count for nothing, be they nan
    return (counted.sum(dtype=factor.dtype) * factor).to(dtype)


_mean: Any = torch.compiler.disable(_computed)  # what it computes is seen where a loss is compiled
