"""Exchange what ranks have logged: at the end of a training step, and of an epoch; the values are one device's.

| what is exchanged | when |
|---|---|
| step values with `sync_dist=True`, all keys together | end of a training step |
| values that follow from sums over the batch (batch/exact/verdict.py) | with these; in evaluation at the epoch's end |
| step values of metrics with `sync_dist=True` | end of such a training step |
| step values of evaluation, where ranks may have unequal numbers of batches | end of the epoch |
| sums of the epoch, with one collective for all keys; metrics exchange their own states | end of the epoch |
| what shows whether ranks have trained alike | with these, after the last hooks of training |
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.trainer.connectors.logger_connector.result import _Sync
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from ...strategies.batch.exact.programs import Programs
from ...strategies.batch.exact.verdict import Values, combined
from ...strategies.core.devices import precise_dtype
from ...strategies.core.errors import ConfigError
from ...strategies.core.module_checks import metrics_of
from ...strategies.distributed.objects import gather_objects, gather_rows
from ...strategies.distributed.same_weights import trained
from .results import LeanResults, Logged, step_of
from .series import START, Entry, Series, Sums, combine

Sent: TypeAlias = tuple[Sums, torch.dtype]
"""What one value of a rank adds to that of the global batch, and its type.

A metric's sums have the kind `metric`, and its name in the module with its states for this rank's samples as the value.
"""
Step: TypeAlias = tuple[int, int, dict[str, Sent]]
"""Index of the global batch in the epoch, step for the loggers, and what this rank has logged, by name."""

_T = TypeVar("_T")


class Exchange:
    """What waits for the end of an evaluation, and the exchanges of one trainer."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        # of batches of evaluation, by loader and index, what depends on what other ranks have logged
        self._waiting: list[tuple[tuple[int, int], Tensor, list[Logged]]] = []
        self._steps: list[tuple[int, int, dict[str, Sent | Logged | Tensor]]] = []
        self._told: set[str] = set()
        self.has_ended = False
        """Whether ranks have exchanged what the training step in process has logged."""
        self._has_sums = True

    def begin_batch(self) -> None:
        """Begin a batch, of which nothing is exchanged yet."""
        self.has_ended, self._has_sums = False, True

    def end_step(self, results: LeanResults) -> None:
        """Bring the values that this rank logged in a training batch to what they are for the global batch."""
        if results.ranks is None:  # this rank has gone on alone within the batch
            results.flush()
            return
        if not (results.pending or self._has_sums):
            return
        values = _values(results)
        may_sum = self._has_sums and not self.has_ended and values.calls
        programs = values.of("training_step") if may_sum else {}
        self._has_sums = False
        last = {id(one.series): one for one in results.pending or () if one.series.shared}.values()
        groups = [*([None] if programs else []), *(one.series.meta.sync.group for one in last)]
        for group in dict.fromkeys(groups):
            shared = [one for one in last if one.series.meta.sync.group is group]
            self._exchange_together(results, shared, programs if group is None else {}, group)
        logged = results.flush()
        if logged and results.shares_steps:
            _exchange_metrics(results, logged)

    def _exchange_together(self, results: LeanResults, shared: list[Logged], programs: Programs, group: Any) -> None:
        """Exchange step values, and what programs need, by one collective; all ranks have the same keys in order."""
        values, device = _values(results), self._trainer.strategy.root_device
        packed = [values.packed(programs, device)] if programs else []
        for one in shared:
            pair = (one.series.last, results.step_weight(one))
            packed += [torch.as_tensor(part).to(device, precise_dtype(device)).reshape(1) for part in pair]
        rows = gather_rows(torch.cat(packed), group)
        size = rows.shape[1] - 2 * len(shared)
        for i, one in enumerate(shared):
            one.series.last = _over_ranks(one.series.kind, *rows[:, size + 2 * i :].T[:2]).to(one.series.last)
        found = zip(combined(programs, rows[:, :size]), values.calls, strict=False)
        own = [{name: call[name] for name in call.keys() & logged.keys()} for call, (_, logged) in found]
        _replace(results.pending or [], own, "training_step")

    def end_evaluated(self, results: LeanResults) -> None:
        """Keep what was logged in a batch of evaluation until the epoch ends, as far as it depends on other ranks."""
        if results.ranks is None:
            return
        values, step, loader = _values(results), self._step_name, results.dataloader_idx or 0
        programs = values.of(step, loader)
        if not programs:
            results.flush()
            return
        packed = values.packed(programs, self._trainer.strategy.root_device)
        self._waiting.append((results.ranks.contract.evaluated, packed, results.pending or []))
        results.pending = []

    def keep_step(self, results: LeanResults, step: int) -> None:
        """Keep the step values, for the loggers' step, of the batch that `end_evaluated` has ended."""
        kept = dict[str, Sent | Logged | Tensor]()
        for _, series in results.valid_items():
            if series.on_step and (series.meta.logger or series.meta.prog_bar):
                value = _states(series, results)
                value = value or (series.logged if series.shared and series.logged else series.step_value())
                if value is not None:
                    kept[results.shown_name(series, True)] = value
        assert results.ranks is not None
        self._steps.append((results.ranks.contract.evaluated[1], step, kept))

    @property
    def _step_name(self) -> str:
        return "test_step" if self._trainer.testing else "validation_step"

    def end_epoch(self, results: LeanResults, last: bool = False) -> list[tuple[int, dict[str, Any]]]:
        """Compute the epoch's values over all ranks; every rank must call it.

        A rank without batches takes part with zero weight and receives the values too, since callbacks act on them.

        Args:
            last: whether all hooks of the epoch have run.

        Returns:
            Of evaluation: step for the loggers (rank 0's, continued where only other ranks had a batch), and values
            that waited for the end of the epoch by name, in order.

        Raises:
            ConfigError: the sanity check shows that ranks disagree on a value of an epoch's hook.
        """
        if not results.training:
            self._count_waiting(results)
        for metric in metrics_of(self._trainer.lightning_module):
            metric._computed = None  # without updates on this rank it may have some on others
        own: dict[str, Series] = {
            key: series
            for key, series in results.valid_items()
            if series.on_epoch and series.computed is None and not series.meta.sync.rank_zero_only
        }
        described = {key: {**series.entry(), "dtype": series.sums.value.dtype} for key, series in own.items()}
        ranks = results.ranks if last and results.training else None
        digests = [] if ranks is None else trained(self._trainer.lightning_module, self._trainer.optimizers)
        gathered = gather_objects(
            (apply_to_collection(described, Tensor, Tensor.item), self._take_steps(results), digests)
        )
        if ranks is not None:
            ranks.contract.agreement.compare([digests for _, _, digests in gathered])
        for key, entries in _by_name([entries for entries, *_ in gathered]).items():
            self._verify_hook_value(key, entries)
            series = own.get(key) or self._stand_in(results, key, entries[0])
            if series.is_tensor:
                value = combine([Sums(**entry["sums"]) for entry in entries]).result()
                dtype = max((entry["dtype"] for entry in entries), key=lambda dtype: dtype.itemsize)
                series.computed = torch.tensor(value, dtype=dtype, device=series.device)
            else:
                series.compute()
        return self._combined_steps([steps for _, steps, _ in gathered], results)

    def _count_waiting(self, results: LeanResults) -> None:
        """Replace what was logged since the last call by what the parts of all ranks make of it, and count it."""
        values, step, waiting = _values(results), self._step_name, self._waiting
        self._waiting = []
        if values.knows_none(step):
            return
        parts = dict[tuple[int, int], list[Tensor]]()
        for rank in gather_objects([(place, packed.tolist()) for place, packed, _ in waiting]):
            for place, row in rank:
                parts.setdefault(place, []).append(torch.tensor(row, dtype=torch.float64))
        for place, _, logged in waiting:
            _replace(logged, combined(values.of(step, place[0]), torch.stack(parts[place])), step)
            results.pending = logged
            results.flush()
        results.pending = None

    def _take_steps(self, results: LeanResults) -> list[Step]:
        """Return all steps kept so far, to be sent, and clear them."""
        steps, self._steps = self._steps, []
        return [(index, step, {name: _sent(kept[name], results) for name in kept}) for index, step, kept in steps]

    @staticmethod
    def _combined_steps(ranks: list[list[Step]], results: LeanResults) -> list[tuple[int, dict[str, Any]]]:
        numbers = {index: step for index, step, _ in ranks[0]}
        combined_steps: list[tuple[int, dict[str, Any]]] = []
        for index in sorted({index for steps in ranks for index, _, _ in steps}):
            step = numbers.get(index, combined_steps[-1][0] + 1 if combined_steps else 0)
            parts = _by_name([kept for steps in ranks for other, _, kept in steps if other == index])
            combined_steps.append((step, {name: _shown(values, results) for name, values in parts.items()}))
        return combined_steps

    def _stand_in(self, results: LeanResults, key: str, entry: Entry) -> Series:
        """Create the series of a key that only other ranks logged."""
        value: Any = torch.zeros((), device=self._trainer.strategy.root_device)
        if entry["reduce_fx"] is None:
            value = self._trainer.lightning_module.get_submodule(entry["meta"]["metric_attribute"])
        series = results[key] = Series.of(entry, _Sync(), value)  # pyright: ignore[reportArgumentType]  # in place of Lightning's metric
        results.restored.add(key)  # this rank may log it later, in a run's next evaluation
        return series

    def _verify_hook_value(self, key: str, entries: Sequence[Entry]) -> None:
        """Refuse, or warn once training has begun, if ranks disagree on a value that an epoch's hook computed.

        No one but the module knows what it is a mean of, so that such values can't be combined.
        """
        meta, sums = entries[0]["meta"], entries[0]["sums"]
        outside = meta["fx"].endswith(("_start", "_end")) and "batch" not in meta["fx"]
        once = sums is not None and sums["kind"] == "mean" and sums["weight"] == 1  # without a `batch_size`
        if not (outside and once) or entries[0]["sync"]["_should"]:
            return
        values = torch.tensor([entry["sums"]["value"] for entry in entries], dtype=torch.float64)
        if key in self._told or values.isclose(values[0], 1e-6, 1e-12, equal_nan=True).all():
            return
        message = (
            f"self.log({meta['name']!r}) in {meta['fx']}: the value is another one on each rank "
            f"({' and '.join(f'{value:.6g}' for value in values[:3].tolist())}), so the mean over ranks is not one "
            "device's. Log it in the step, or pass sync_dist=True and batch_size=<number of this rank's samples that "
            "it is a mean of>, or rank_zero_only=True for rank 0's own value."
        )
        if self._trainer.sanity_checking:
            raise ConfigError(message)
        self._told.add(key)
        rank_zero_warn(message)


def _values(results: LeanResults) -> Values:
    assert results.ranks is not None
    return results.ranks.contract.reader.values


def _replace(logged: list[Logged], found: list[dict[str, Tensor]], step: str) -> None:
    """Replace means that the calls of a step have logged by those found of each, unless these are nan."""
    for one in logged:
        name = one.series.meta.name
        own = next((call for call in found if name in call), None)
        if own is None or one.copy is None or one.series.kind != "mean" or step_of(one.series.meta)[0] != step:
            continue
        value = own.pop(name).to(one.copy)
        one.copy = torch.where(value.isnan(), one.copy, value)
        if step == "training_step":
            one.series.last = one.copy


def _over_ranks(kind: str, values: Tensor, weights: Tensor) -> Tensor:
    """Combine the values of ranks; one of weight 0 has no samples."""
    if kind == "mean":
        return torch.where(weights > 0, values * weights, 0.0).sum() / weights.sum()
    values = values.where(weights > 0, START[kind])
    return values.sum() if kind == "sum" else values.amax() if kind == "max" else values.amin()


def _exchange_metrics(results: LeanResults, logged: Sequence[Logged]) -> None:
    """Make the step values of metrics the global batch's."""
    of_batch, own, all_series = {id(one.series) for one in logged}, dict[str, Sent](), cast(Any, results)
    for key, series in all_series.items():
        if id(series) in of_batch and (states := _states(series, results)) is not None:
            own[key] = states
    for key, parts in _by_name(gather_objects(own)).items() if own else ():
        all_series[key].last = _shown(parts, results).to(all_series[key].device)


def _states(series: Series, results: LeanResults) -> Sent | None:
    """What a metric that the step has called has counted in it, if the value for the global batch is asked for."""
    steps = results.metric_steps
    if steps is None or series.is_tensor or not series.on_step or not series.meta.sync.should:
        return None
    if not steps.recorded(series.value):
        return None
    return Sums("metric", (series.meta.metric_attribute, steps.states(series.value))), torch.float64


def _sums(kind: str, value: Tensor, weight: float) -> Sent:
    """The sums of one value, as numbers, and its type."""
    return Sums(kind, float(value) * weight if kind == "mean" else float(value), weight), value.dtype


def _sent(value: Sent | Logged | Tensor, results: LeanResults) -> Sent:
    if isinstance(value, Logged):
        assert value.copy is not None
        return _sums(value.series.kind, value.copy, float(results.weight(value)))
    return _sums("own", value, 0) if isinstance(value, Tensor) else value


def _by_name(ranks: Sequence[Mapping[str, _T]]) -> dict[str, list[_T]]:
    """What the ranks that have something under a name have, in order of rank."""
    found: dict[str, list[_T]] = {}
    for one in ranks:
        for name, value in one.items():
            found.setdefault(name, []).append(value)
    return found


def _shown(sent: list[Sent], results: LeanResults) -> Tensor:
    """Combine the values that the ranks logged under a name."""
    steps, values = results.metric_steps, [value for value, _ in sent]
    if values[0].kind != "metric" or steps is None:
        return torch.tensor(combine(values).result(), dtype=sent[0][1])
    metric = results.trainer.lightning_module.get_submodule(values[0].value[0])
    assert isinstance(metric, Metric)
    return torch.as_tensor(steps.value(metric, [value.value[1] for value in values])).cpu()
