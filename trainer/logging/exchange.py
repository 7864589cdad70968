"""Exchange what ranks have logged, by one collective for all keys, at the end of a training step and of an epoch."""

from collections.abc import Sequence

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.trainer.connectors.logger_connector.result import _Sync
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from ...strategies.batch.exact.programs import Programs
from ...strategies.batch.exact.verdict import Values, combined
from ...strategies.core.devices import precise_dtype
from ...strategies.core.module_checks import metrics_of
from ...strategies.distributed.objects import gather_objects, gather_rows, trained
from .results import LeanResults, Logged, step_of
from .series import START, Entry, Series, columns, combine


def end_step(results: LeanResults) -> None:
    """Bring the values that this rank logged in a training batch to what they are for the global batch."""
    if results.ranks is not None:  # else this rank has gone on alone within the batch
        values = _values(results)
        programs = values.of("training_step") if values.calls else {}
        shared = {id(one.series): one for one in results.pending or () if one.series.shared}
        if programs or shared:
            _exchange_together(results, [*shared.values()], programs)
        values.calls.clear()
    results.flush()


def end_evaluated(results: LeanResults) -> None:
    """Keep what was logged in a batch of evaluation until the epoch ends, as far as it depends on other ranks."""
    if results.ranks is not None:
        programs = _values(results).of(_evaluation(results), results.dataloader_idx or 0)
        if programs:
            packed = _values(results).packed(programs, results.trainer.strategy.root_device)
            results.waiting.append((results.ranks.contract.evaluated, packed, results.pending or []))
            results.pending = []
    results.flush()


def end_epoch(results: LeanResults, last: bool = False) -> None:
    """Compute the epoch's values, also on a rank without batches; `last`: whether all its hooks have run."""
    trainer, module = results.trainer, results.trainer.lightning_module
    if not results.training:
        _count_waiting(results)
    for metric in metrics_of(module):
        metric._computed = None  # without updates on this rank it may have some on others
    own: dict[str, Series] = {
        key: series
        for key, series in results.valid_items()
        if series.on_epoch and series.computed is None and not series.meta.sync.rank_zero_only
    }
    described = {key: {**series.entry(), "last": None, "dtype": series.sum.dtype} for key, series in own.items()}
    ranks = results.ranks if last and results.training else None
    digests = [] if ranks is None else trained(module, trainer.optimizers)
    gathered = gather_objects((apply_to_collection(described, Tensor, Tensor.item), digests))
    if ranks is not None:
        ranks.contract.agreement.compare([digests for _, digests in gathered])
    for key in dict.fromkeys(key for entries, _ in gathered for key in entries):
        entries = [of_rank[key] for of_rank, _ in gathered if key in of_rank]
        _verify_hook_value(results, key, entries)
        series = own.get(key) or results.make(key, entries[0], _Sync())
        if not series.is_tensor:
            series.compute()
            continue
        value, weight = combine(series.kind, *columns(entries))
        dtype = max((entry["dtype"] for entry in entries), key=lambda dtype: dtype.itemsize)
        series.computed = (value / weight if series.kind == "mean" else value).to(series.device, dtype)


def _count_waiting(results: LeanResults) -> None:
    """Replace what was logged since the last call by what the parts of all ranks make of it, and count it."""
    values, step, waiting = _values(results), _evaluation(results), results.waiting
    results.waiting = []
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


def _verify_hook_value(results: LeanResults, key: str, entries: Sequence[Entry]) -> None:
    """Warn if ranks disagree on a value that an epoch's hook computed: only the module knows its weights."""
    meta, sums = entries[0]["meta"], entries[0]["sums"]
    outside = meta["fx"].endswith(("_start", "_end")) and "batch" not in meta["fx"]
    once = sums is not None and sums["kind"] == "mean" and sums["weight"] == 1  # without a `batch_size`
    if not (outside and once) or entries[0]["sync"]["_should"] or key in results.told:
        return
    values, _ = columns(entries)
    if not values.isclose(values[0], 1e-6, 1e-12, equal_nan=True).all():
        results.told.add(key)
        rank_zero_warn(
            f"self.log({meta['name']!r}) in {meta['fx']}: the value is another one on each rank "
            f"({' and '.join(f'{value:.6g}' for value in values[:3].tolist())}), so the mean over ranks is not one "
            "device's. Log it in the step, or pass sync_dist=True and batch_size=<number of this rank's samples "
            "that it is a mean of>, or rank_zero_only=True for rank 0's own value."
        )


def _values(results: LeanResults) -> Values:
    assert results.ranks is not None
    return results.ranks.contract.reader.values


def _evaluation(results: LeanResults) -> str:
    return "test_step" if results.trainer.testing else "validation_step"


def _exchange_together(results: LeanResults, shared: Sequence[Logged], programs: Programs) -> None:
    """Exchange step values, and what programs need, by one collective; all ranks have the same keys in order."""
    values, device = _values(results), results.trainer.strategy.root_device
    packed = [values.packed(programs, device)] if programs else []
    for one in shared:
        scale = results.scale(one)  # and 0 on a rank without samples
        weight = scale if scale is not None else 1 if one.share is None else one.share.num
        pair = (one.series.last, weight)
        packed += [torch.as_tensor(part).to(device, precise_dtype(device)).reshape(1) for part in pair]
    rows = gather_rows(torch.cat(packed))
    size = rows.shape[1] - 2 * len(shared)
    for one, (value, weight) in zip(shared, rows[:, size:].T.reshape(-1, 2, len(rows)), strict=True):
        kind = one.series.kind
        counted = torch.where(weight > 0, value * weight if kind == "mean" else value, START[kind])  # others are nan
        whole, total = combine(kind, counted, weight)
        one.series.last = (whole / total if kind == "mean" else whole).to(one.series.last)
    found = zip(combined(programs, rows[:, :size]), values.calls, strict=False)
    own = [{name: call[name] for name in call.keys() & logged.keys()} for call, (_, logged) in found]
    _replace(results.pending or [], own, "training_step")


def _replace(logged: list[Logged], found: list[dict[str, Tensor]], step: str) -> None:
    """Replace means that the calls of a step have logged by those found of each, unless these are nan."""
    for one in logged:
        name = one.series.meta.name
        own = next((call for call in found if name in call), None)
        if own is None or one.series.kind != "mean" or step_of(one.series.meta)[0] != step:
            continue
        value = own.pop(name).to(one.copy)
        one.copy = torch.where(value.isnan(), one.copy, value)
        if step == "training_step":
            one.series.last = one.copy
