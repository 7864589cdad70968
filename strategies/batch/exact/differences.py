"""Tell by how much what parts of a batch compute differs from the whole's: gradients, values and what they hold."""

import itertools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..losses import is_loss
from ..tree import walk

_MOST_ELEMENTS = 2**16
"""Of the parameters whose gradients are compared."""
_EXACT, _CLOSE = 1e-8, 1e-3
"""Differences, relative to the largest number: of rounding in float64, and in narrower types."""


def small_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Some of the parameters that are trained, the smallest first."""
    trained = sorted((p for p in module.parameters() if p.requires_grad), key=nn.Parameter.numel)
    sums = itertools.accumulate(p.numel() for p in trained)
    return [p for i, (p, total) in enumerate(zip(trained, sums, strict=True)) if not i or total <= _MOST_ELEMENTS]


def gradients(losses: Sequence[Tensor], shares: Sequence[float], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The sum of the gradients of losses, each times its share."""
    total = [
        torch.zeros_like(p, dtype=torch.float64 if p.dtype is torch.float64 else torch.float32) for p in parameters
    ]
    for loss, share in zip(losses, shares, strict=True):
        if not loss.requires_grad:
            continue
        found: Sequence[Tensor | None] = ()
        with suppress(RuntimeError):  # reentrant checkpoints go backward no other way
            found = torch.autograd.grad(loss * share, parameters, allow_unused=True, retain_graph=True)
        # nor do hooks that compute gradients
        if all(one is None for one in found):  # pyright: ignore[reportUnnecessaryComparison]  # of what is unused
            for parameter in parameters:
                parameter.grad = None
            (loss * share).backward(retain_graph=True)
            found = [parameter.grad for parameter in parameters]
        for one, gradient in zip(total, found, strict=True):
            if gradient is not None:
                one += gradient.to_dense() if gradient.is_sparse else gradient
    return total


def differences(expected: Sequence[Tensor], found: Sequence[Tensor]) -> list[float]:
    """By how much each gradient differs, relative to the largest number in those expected; infinity if by nan."""
    largest = max((float(one.abs().max()) for one in expected if one.numel()), default=0.0) or 1.0
    pairs = zip(expected, found, strict=True)
    return [float((a - b).abs().nan_to_num(torch.inf).max()) / largest if a.numel() else 0.0 for a, b in pairs]


def tolerance(value: Any, parameters: Sequence[Tensor]) -> float:
    """How large a difference may be, by the least precise dtype among a value and parameters."""
    numbers = [one for one in (value, *parameters) if isinstance(one, Tensor) and one.is_floating_point()]
    eps = max((torch.finfo(one.dtype).eps for one in numbers), default=torch.finfo(torch.float32).eps)
    return _EXACT if eps < 1e-12 else max(_CLOSE, 16 * eps)


def are_alike(one: Any, other: Any, losses: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    """Whether two values hold the same tensors, numbers and strings, but for what is one of some losses."""
    kinds = (Tensor, np.ndarray, int, float, str)
    ours, theirs = ([leaf for _, leaf in walk(value) if isinstance(leaf, kinds)] for value in (one, other))
    for a, b in zip(ours, theirs, strict=False):
        if isinstance(b, Tensor) and any(is_loss(a, loss) for loss in losses):
            continue
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype.kind in "biufc":
            a, b = torch.as_tensor(a), torch.as_tensor(b)
        is_float = isinstance(a, float) or (isinstance(a, Tensor) and a.is_floating_point())
        if unlike(a, b, tolerance(a, parameters) if is_float else 1e-6):
            return False
    return len(ours) == len(theirs)


def unlike(one: Any, other: Any, by: float = 1e-6) -> bool:
    """Whether two values, or what they hold, differ by more than a fraction of the largest."""
    if one is other:
        return False
    (held, kind), (others, other_kind) = tree_flatten(one), tree_flatten(other)
    return kind != other_kind or any(a is not b and _apart(a, b, by) for a, b in zip(held, others, strict=True))


def _apart(one: Any, other: Any, by: float) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        one, other = torch.as_tensor(one), torch.as_tensor(other)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or not by:
            return not torch.equal(one, other)
        a, b = one.detach().double(), other.detach().double().to(one.device)
        by = min(by, 1e-8) if one.dtype == other.dtype == torch.float64 else by
        return not torch.allclose(a, b, rtol=0, atol=by * float(b.abs().max() if b.numel() else 0), equal_nan=True)
    if type(one) is not type(other):
        return True
    if isinstance(one, (float, np.floating)):
        return not (abs(one - other) <= by * abs(other) or (one != one and other != other))
    return bool(one != other)
