"""Compute means and functions of a batch's samples on the global batch, however strategies cut it.

where parts meet       how
replicas               parts meet; the function is computed once, on all rows with their graphs
ranks                  each computes it on everybody's rows, its own with a graph
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec, Protocol

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function
from typing_extensions import override

from ..core.errors import ConfigError
from ..core.transfers import seen_by_others
from .meeting import seat

P = ParamSpec("P")


class Ranks(Protocol):
    """This rank among those that have a part of the same batch."""

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        ...

    def is_part(self) -> bool:
        """Whether other ranks may have samples of the batch that this rank's step is given."""
        ...

    def counts(self) -> bool:
        """Whether this rank has samples of it; if not its step has run on others."""
        ...

    def share(self) -> Tensor | float:
        """The fraction by which this rank's gradients count in the global batch's; asked in the backward pass."""
        ...

    def gather(self, rows: Sequence[Tensor]) -> list[list[Tensor]]:
        """The tensors of all ranks, without graphs, by rank; of any number of rows. This rank's are at `rank`."""
        ...


_ranks: list[Ranks] = []
"""The ranks of the run, last; empty without."""


class among:  # a context of every step: one by a generator takes twice as many calls
    """Compute what is over the batch with the rows of other ranks inside the block; None: with what is given alone."""

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = [] if ranks is None else [ranks]

    def __enter__(self) -> None:
        self._ranks, _ranks[:] = list(_ranks), self._ranks

    def __exit__(self, *_: object) -> None:
        _ranks[:] = self._ranks


class OverBatch(torch.autograd.Function):
    """The value of the whole batch as a part of it sees it: the term's gradient counts by the part's samples.

    The parts' fractions sum to 1, so that what the function refers to beside its arguments (a temperature, a head) has
    the whole batch's gradient in the end, and so have rows whose graphs have met. Rows of other ranks have no graph
    here: each rank's own get their gradients from `_OwnRows`, which divides by the fraction again.
    """

    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0]


class _OwnRows(torch.autograd.Function):
    """A rank's own rows, whose gradients are the whole batch's whatever fraction the rank has of it."""

    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, share: Callable[[], Tensor | float]) -> Tensor:
        ctx.share = share
        return rows.view_as(rows)

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        share = torch.as_tensor(ctx.share(), dtype=grad_outputs[0].dtype).reshape(())
        return grad_outputs[0] / torch.where(share == 0, 1.0, share), None


def over_batch(fn: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Compute a loss on the global batch, whichever strategy cuts it, with exact gradients.

    For losses that compare samples with one another (InfoNCE, hard mining, Barlow Twins, centred advantages): what is
    computed on the parts of a batch can't be combined to the batch's. Where the batch is not cut, `fn` is called as it
    is. "The batch" is that of one forward pass, under accumulation too.

    Args:
        fn: gets tensors and returns a scalar. Arguments that are tensors with a dimension are joined by rows,
            those of the parts in their order; any number of rows is right. Parameters, scalars and everything else are
            passed on, those of the first part. All parts must call it alike.

    Returns:
        A function with the arguments of `fn`. It returns the global batch's value on every part, which is combined with
        the other terms of the loss as a mean over samples is.

    Example:
        >>> loss = evener.over_batch(info_nce)(self(first), self(second), temperature=0.1)
    """

    return partial(value_over_batch, fn)


def value_over_batch(fn: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Compute a function on the global batch; see `over_batch`. Modes of torch see this function."""
    return _value(fn, args, kwargs)


def _computed(fn: Callable[..., Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    given = (*args, *kwargs.values())
    if seen_by_others(given):
        return handle_torch_function(value_over_batch, given, fn, *args, **kwargs)
    value = _whole(fn, args, kwargs)
    is_followed = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
    return OverBatch.apply(value) if is_followed else value


_value: Any = torch.compiler.disable(_computed)  # parts meet, and the node stays in the graph of a compiled loss


def verify_no_step_end(module: pl.LightningModule) -> None:
    """Refuse Lightning 1's `training_step_end(outputs)`, in which a loss of the whole batch was computed."""
    if hasattr(module, "training_step_end"):
        raise ConfigError(
            f"{type(module).__name__} defines training_step_end, which Lightning 2 doesn't call. Return the loss from "
            "training_step, and compute what needs the whole batch in evener.over_batch(fn)(...)."
        )


def _whole(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    here, given = seat(), {**dict(enumerate(args)), **kwargs}
    if here is not None:
        name = getattr(fn.func if isinstance(fn, partial) else fn, "__name__", type(fn).__name__)
        return here.meet(f"over_batch({name})", (fn, given), _combine)
    is_cut = bool(_ranks) and _ranks[-1].is_part()
    return _combine({0: (fn, given)})[0] if is_cut else fn(*args, **kwargs)


def _combine(brought: Mapping[int, Any]) -> Mapping[int, Any]:
    """Compute a function of the batch for the parts that have met: once, on the device of the first.

    Args:
        brought: the function and its arguments, by their numbers and names, by part of this process.
    """
    fn, given = brought[min(brought)]
    places = [
        place
        for place, value in given.items()
        if isinstance(value, Tensor) and value.dim() and not isinstance(value, nn.Parameter)
    ]
    ranks = _ranks[-1] if _ranks and _ranks[-1].is_part() else None
    parts = {part: [own[place] for place in places] for part, (_, own) in brought.items()}
    columns = [[rows.to(column[0].device) for rows in column] for column in zip(*parts.values(), strict=True)]
    if ranks is not None:
        if not ranks.counts():
            columns = [[rows[:0] for rows in column] for column in columns]
        gathered, rank = ranks.gather([torch.cat(column).detach() for column in columns]), ranks.rank
        for own, everyones in zip(columns, gathered, strict=True):  # those of other ranks have no graphs
            has_graph = torch.is_grad_enabled() and any(rows.requires_grad for rows in own)
            mine: Any = [_OwnRows.apply(rows, ranks.share) for rows in own] if has_graph else own
            own[:] = [*everyones[:rank], *mine, *everyones[rank + 1 :]]
    given = given | {place: torch.cat(column) for place, column in zip(places, columns, strict=True)}
    args = (value for place, value in given.items() if not isinstance(place, str))
    value = fn(*args, **{place: value for place, value in given.items() if isinstance(place, str)})
    return {part: value.to(rows[0].device) if rows else value for part, rows in parts.items()}


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


def _weighted(values: Tensor, weight: Tensor | None) -> Tensor:
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


_mean: Any = torch.compiler.disable(_weighted)  # what it computes is seen where a loss is compiled
