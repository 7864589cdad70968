"""Take what is logged, without Lightning's checks after a key's first value, and collect it when it is read."""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.connectors.logger_connector import _LoggerConnector
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torchmetrics import MetricCollection
from typing_extensions import override

from ...strategies.core.module_log import LOG_OPTIONS, ModuleLog
from ...strategies.core.patching import Replacement, replaced
from ...strategies.core.types import Batch
from .exchange import end_epoch, end_evaluated, end_step
from .results import LeanResults

_LOG, _LOG_DICT = pl.LightningModule.log, pl.LightningModule.log_dict
_OPTIONS = tuple(name for name in LOG_OPTIONS if name != "batch_size")
"""The options that a series keeps: the arguments of `log` besides name, value and batch size."""


def _collected(name: str) -> Any:
    """An attribute whose metrics are collected before it is read or replaced."""

    def write(connector: "LeanLoggerConnector", metrics: dict[str, Any]) -> None:
        connector.settled()[name] = metrics

    return property(lambda connector: connector.settled()[name], write)


class LeanLoggerConnector(_LoggerConnector):
    """Lightning's logger connector, except that the metrics of a step are collected when they are read."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self.batch_results: LeanResults | None = None
        """The results of the loop that is processing a batch; None between batches."""
        self._unread: LeanResults | None = None
        self._metrics: dict[str, dict[str, Any]] = {}
        self.is_exchanged = False
        """Whether ranks have exchanged all that was logged before the end of the evaluation that comes next."""
        super().__init__(trainer)

    @override
    def on_batch_start(
        self, batch: Batch, dataloader_idx: int | None = None, results: LeanResults | None = None
    ) -> None:
        """Begin a batch; a loop that has its results at hand gives them, which are found slowly."""
        if results is None:
            results = cast(LeanResults, self.trainer._results)
        self._first_loop_iter = self._first_loop_iter is None
        if results.dataloader_idx != dataloader_idx:
            self.settled()
            results.dataloader_idx = dataloader_idx
        results.flush()  # of an interrupted step
        ranks, results.pending = results.ranks, None
        if ranks is not None:
            results.pending = []
            results.share = ranks.contract.shares.current
        self.batch_results = results
        results.batch = batch
        results.batch_size = None

    @override
    def on_batch_end(self) -> None:
        """End a batch; metrics are collected later."""
        results = self.batch_results
        assert results is not None
        if results.pending is not None:
            (end_step if results.training else end_evaluated)(results)
        if results and self._unread is not results:
            self.settled()
            self._unread = results
        results.batch = None
        results.batch_size = None
        self._leave_batch()

    def _leave_batch(self) -> None:
        results, self.batch_results = self.batch_results, None
        if results is not None:
            results.flush()
            results.pending = None

    def log_train_step(self, num_steps: int) -> None:
        """Send a step's values to the loggers every `log_every_n_steps` of the batches that stepped the optimizer."""
        trainer: Any = self.trainer
        every = trainer.log_every_n_steps
        if (every and (num_steps % every == 0 or trainer.should_stop)) or trainer.fast_dev_run:
            self.log_metrics(self.metrics["log"])

    def settled(self) -> dict[str, dict[str, Any]]:
        """All that was collected, with the metrics of the last step."""
        results, self._unread = self._unread, None
        if results is not None:
            for name, metrics in results.metrics(on_step=True).items():
                self._metrics[name].update(cast(Any, metrics))
        return self._metrics

    @override
    def epoch_end_reached(self) -> None:
        self.settled()
        self._leave_batch()
        super().epoch_end_reached()
        if not self.is_exchanged:
            self._share()
        self.is_exchanged = False

    @override
    def on_epoch_end(self) -> None:
        self._share(last=True)  # values logged by the epoch's last hooks
        super().on_epoch_end()

    def _share(self, last: bool = False) -> None:
        results = cast(LeanResults | None, self.trainer._results)
        if results is not None and results.ranks is not None:
            end_epoch(results, last)

    @override
    def reset_results(self) -> None:
        self.settled()
        self._leave_batch()
        super().reset_results()

    # Lightning keeps three plain dictionaries
    _callback_metrics: Any = _collected("callback")
    _logged_metrics: Any = _collected("log")
    _progress_bar_metrics: Any = _collected("pbar")


class LeanLog(ModuleLog):
    """Replaces a module's `log` while its trainer runs."""

    def __init__(self, trainer: pl.Trainer) -> None:
        module = trainer.lightning_module
        super().__init__(module)
        self.own = _LOG.__get__(module)  # not the strategy's
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
    """Whether each group's metrics share its first's states; `items()`, at an update's cost, would set them again."""
    metrics: Any = vars(collection)["_modules"]
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
    """Replace the `log` of the module, which callbacks use too, inside the block, unless the module overrides it."""
    module = trainer.lightning_module
    before = vars(module).get("log")  # the strategy's, or the user's
    plain = before.own if isinstance(before, ModuleLog) else module.log
    own = plain != _LOG.__get__(module)
    iterates = is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)
    is_compiled = module._compiler_ctx is not None
    if own or iterates or is_compiled or trainer.barebones or module._fabric is not None:
        # Lightning's reads signatures, which can't be traced
        with replaced(module, "log", torch.compiler.disable(module.log)) if is_compiled and not own else nullcontext():
            yield
        return
    through = [callback for callback in trainer.callbacks if getattr(callback, "log", None) == plain]
    with ExitStack() as stack:
        log = LeanLog(trainer)
        stack.callback(log.remove)
        if type(module).log_dict is _LOG_DICT and "log_dict" not in vars(module):
            stack.callback(Replacement(module, "log_dict", _log_dict).remove)
        for callback in through:
            stack.enter_context(replaced(callback, "log", log))
        yield
