"""Stand in for a value of a whole batch that can't be computed of its parts: using it raises, and nothing else does.

`forward` of a torchmetrics metric returns the value of the samples it is given. Those of a chunk, a micro-batch or a
rank may be too few for a value (R2Score needs two samples); whoever logs the metric itself does not ask for it.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from .errors import ConfigError
from .module_checks import is_metric
from .patching import replaced


class NoValueError(ConfigError):
    """The value of a part of a batch is used, but can't be computed."""


_MOVES = (Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.detach, Tensor.clone, Tensor.__deepcopy__)


class NoValue(Tensor):
    """Stands for the value of a part of a batch that can't be computed; it may be moved, but using it raises."""

    reason = ""

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MOVES:
            return args[0]
        if func in (Tensor.is_floating_point, Tensor.is_complex):  # asked before a move
            return False
        reason = next(arg.reason for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, NoValue))
        raise NoValueError(reason)

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"NoValue({self.reason})"


def empty_copy(metric: nn.Module, memo: dict[int, Any] | None = None) -> Any:
    """Copy a metric or a collection, and those in it, without what they have counted, which may have a graph.

    Hooks stay, too: a metric that has buffers of its own is a part of a stage, which watches it.

    Args:
        memo: of `copy.deepcopy`: what several metrics share, their copies share.
    """
    with ExitStack() as stack:
        for part in metric.modules():
            states = dict(part._defaults) if is_metric(part) else {}
            if states:
                states |= {"_computed": None, "_forward_cache": None}
            states |= {"_forward_hooks": OrderedDict(), "_forward_pre_hooks": OrderedDict()}
            for name, empty in states.items():
                stack.enter_context(replaced(part, name, empty))
        made: Any = copy.deepcopy(metric, memo)
    made.reset()
    if isinstance(made, MetricCollection):  # every member keeps its own state, which is merged
        made._enable_compute_groups = False
        made._groups_checked = False
    return made


def part_value(metric: Metric, forward: Callable[..., Any], keep: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call `forward` of a metric, perhaps replaced, with a part of a batch, which the metric counts in any case.

    Args:
        keep: called with the metric before each value of the part; None for nothing.

    Returns:
        The value of these samples, or a `NoValue`.
    """
    compute, name = metric.compute, type(metric).__name__

    def computed() -> Any:
        if keep is not None:
            keep(metric)
        try:
            return compute()
        except NoValueError:
            raise
        except (ValueError, RuntimeError, IndexError, ZeroDivisionError) as exc:
            return no_value(
                f"{name}: the value of a part of the batch can't be computed ({exc}). Call {name}.update(...) if only "
                "the epoch's value is wanted, or log the metric itself (under ranks with sync_dist=True), which has "
                "the whole batch's value."
            )

    with replaced(metric, "compute", computed):
        try:
            return forward(*args, **kwargs)
        except NoValueError as exc:  # of a metric within this one
            return no_value(str(exc))


def no_value(reason: str) -> NoValue:
    """Make a `NoValue` that gives a reason."""
    value = torch.zeros(()).as_subclass(NoValue)
    value.reason = reason
    return value
