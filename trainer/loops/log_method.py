"""Speed up `self.log` and `self.log_dict`: Lightning's own method for a key's first value, a slot for all others."""

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torchmetrics import MetricCollection
from typing_extensions import override

from ...strategies.core.module_log import LOG_OPTIONS, ModuleLog
from ...strategies.core.patching import Replacement, replaced
from ..logging.connector import LeanLoggerConnector
from .hook_plan import MODULE

_OPTIONS = tuple(name for name in LOG_OPTIONS if name != "batch_size")
"""The options that a series keeps: the arguments of `log` besides name, value and batch size."""


class LeanLog(ModuleLog):
    """Replaces a module's `log` while its trainer runs."""

    def __init__(self, trainer: pl.Trainer) -> None:
        module = trainer.lightning_module
        super().__init__(module)
        self.own = MODULE["log"].__get__(module)  # not the strategy's
        connector: Any = trainer._logger_connector
        self.trainer: Any = trainer
        self.connector: LeanLoggerConnector = connector
        self.state: dict[str, Any] = module.__dict__

    @override
    def keep(  # in full, since a call with `*args, **options` takes longer
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        options = (
            prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, sync_dist_group,
            add_dataloader_idx, metric_attribute, rank_zero_only,
        )  # fmt: skip
        connector, fx = self.connector, self.state["_current_fx_name"]
        if not torch.compiler.is_compiling() and (results := connector.batch_results) is not None:
            series = results.quick.get((fx, name, results.dataloader_idx))
            # in the first batches Lightning may have another hook reset its values
            has_entered = connector._current_fx == fx or connector._first_loop_iter is False
            if series is not None and series.options == options and has_entered:
                connector._current_fx = fx
                if not series.is_tensor and value is series.value and not series.on_step:  # a metric: it has its values
                    series.computed, series.has_reset = None, False
                    return
                if results.store(series, value, batch_size):
                    return
        self._log_first(fx, name, value, options, batch_size)

    def _log_first(self, fx: str, name: str, value: Any, options: tuple[Any, ...], batch_size: Any) -> None:
        """Log a value by Lightning's method, with its checks, and let further values do without them."""
        results, given = self.connector.batch_results, dict(zip(_OPTIONS, options, strict=True))
        self.own(name, value, batch_size=batch_size, **given)
        if results is None:
            return
        if results.pending and results.pending[-1].series.meta.name == name:
            results.pending[-1].value = value  # Lightning's method has stored a copy, which is not known as the loss
        series: Any = results.get(results.key(fx, name, given["add_dataloader_idx"]))
        if series is None or given["enable_graph"] or not self.trainer.lean or results.reduces_at_once(series):
            return
        series.options = options
        results.quick[fx, name, results.dataloader_idx] = series


def _log_dict(own: Callable[..., None], dictionary: Any, *args: Any, **options: Any) -> None:
    """Log values by Lightning's method, without linking metrics of a collection anew in each call."""
    values = dictionary
    if type(dictionary) is MetricCollection and shares_states(dictionary):
        renames = dictionary.prefix is not None or dictionary.postfix is not None
        values = dictionary._to_renamed_dict() if renames else dictionary._modules
    own(values, *args, **options)


def shares_states(collection: MetricCollection) -> bool:
    """Whether the metrics of each group have the states of its first, as `update` leaves them.

    `collection.items()`, which `log_dict` calls, sets them all again through `nn.Module.__setattr__`, at the cost of
    an update.
    """
    metrics: Mapping[str, Any] = vars(collection)["_modules"]
    if not collection._groups_checked or collection._state_is_copy:
        return False
    for group in collection._groups.values():  # loops, since generators take longer
        first, *others = [vars(metrics[name]) for name in group]
        for name in ("_update_count", *first["_defaults"]) if first["_defaults"] else ():
            for other in others:
                if other[name] is not first[name]:
                    return False
    return True


@contextmanager
def lean_logging(trainer: Any) -> Generator[None]:
    """Replace the `log` method of the module, which callbacks use too, inside the block.

    Does nothing if the module overrides `log`, or if the trainer does not log. A compiled module's is excluded from
    compilation: Lightning's reads signatures, which can't be traced.
    """
    module = trainer.lightning_module
    before = vars(module).get("log")  # the strategy's, or the user's
    plain = before.own if isinstance(before, ModuleLog) else module.log
    own = plain != MODULE["log"].__get__(module)
    iterates = is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)
    is_compiled = module._compiler_ctx is not None
    if own or iterates or is_compiled or trainer.barebones or module._fabric is not None:
        with replaced(module, "log", torch.compiler.disable(module.log)) if is_compiled and not own else nullcontext():
            yield
        return
    through = [callback for callback in trainer.callbacks if getattr(callback, "log", None) == plain]
    with ExitStack() as stack:
        log = LeanLog(trainer)
        stack.callback(log.remove)
        if type(module).log_dict is MODULE["log_dict"] and "log_dict" not in vars(module):
            stack.callback(Replacement(module, "log_dict", _log_dict).remove)
        for callback in through:
            stack.enter_context(replaced(callback, "log", log))
        yield
