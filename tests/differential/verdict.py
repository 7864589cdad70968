"""Compare two runs: equal, refused, discarded, or wrong."""

from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from outcomes import Failure, Verdict, alike, differences

from .cases import Case, Spread
from .observe import Observed
from .pool import Pool
from .settled import SEVERAL, whole

OWN_PART = ("outputs", "evaluated", "test_outputs")
"""What hooks of a rank see of its own part of a batch; not compared under ranks."""
UNSUMMED = ("raw_gradients",)
"""What `on_after_backward` sees while gradients accumulate, before ranks have summed them."""
AFTER_THE_LAST_STEP = ("epoch", "lr_schedulers", "callbacks", "optimizer_states")
"""Parts of a checkpoint that the end of an epoch changes."""
DIVERGED = 50.0
"""Weights are below 1 at the start; an optimizer that makes them larger than this makes them larger in each step."""
TOLERANCES = {"float64": 1e-10, "float32": 1e-5}


def judge(pool: Pool, case: Case, spread: Spread) -> Verdict:
    """Run a case under a strategy and under what it must equal, and compare."""
    reference = Spread("stock") if spread.kind == "single_device" and not _own(case) else Spread()
    if reference == spread:
        return Verdict("discarded", "nothing to compare one device with: an option or a promise that is Evener's own")
    expected = _run(pool, whole(case, spread), reference)[0]
    if isinstance(expected, str):
        return Verdict("crash", f"{reference.kind} {expected}")
    if expected.failure is not None:
        return _judge_failing_reference(pool, case, spread, expected.failure)
    found = _run(pool, case, spread)
    for rank, one in enumerate(found):
        if isinstance(one, str):
            return Verdict("hung" if one.startswith("hung") else "crash", f"rank {rank} {one}")
    failures = [one.failure for one in found if one.failure is not None]
    if failures:
        first = min(failures, key=lambda one: one.order)
        words = f"{first.phase}, after {first.num_steps} steps, {first.kind}: {first.message}"
        if first.refuses:
            return Verdict("refused", first.message)
        if first.says_why and case.options.num_sanity_val_steps == 0:
            # without a sanity check nothing is seen of validation before training; with it the refusal must come first
            return judge(pool, replace(case, options=replace(case.options, num_sanity_val_steps=2)), spread)
        return Verdict("late" if first.says_why else "crash", f"{words}\n{first.trace}")
    tolerance = max(TOLERANCES[case.dtype], 3e-2 * ("16" in case.options.precision))  # bf16 has 8 bits
    return _compare(case, spread, expected, found, tolerance)


def _run(pool: Pool, case: Case, spread: Spread) -> list[Any]:
    with TemporaryDirectory(prefix="differential-") as folder:
        return pool[spread.num_processes].run(case, spread, folder)


def _own(case: Case) -> bool:
    """Whether Lightning's trainer has no such option, or does not promise what ours does: to resume exactly."""
    return case.options.exact_accumulation or case.options.detect_nonfinite != "off" or case.resume_after > 0


def _judge_failing_reference(pool: Pool, case: Case, spread: Spread, failure: Failure) -> Verdict:
    discarded = Verdict("discarded", f"{failure.phase} {failure.kind}: {failure.message}")
    if spread.kind != "single_device":
        return discarded
    found = _run(pool, case, spread)[0]
    if isinstance(found, str):
        return Verdict("wrong", f"single_device {found}")
    if found.failure is None:
        return Verdict("wrong", f"stock raises {failure.kind}: {failure.message}, and single_device does not")
    same = (failure.phase, failure.kind) == (found.failure.phase, found.failure.kind)
    if same or found.failure.refuses:
        return discarded
    return Verdict("wrong", f"stock raises {failure}, single_device {found.failure}")


def _compare(case: Case, spread: Spread, expected: Observed, found: list[Observed], tolerance: float) -> Verdict:
    if any(float(weight.abs().max()) > DIVERGED for weight in expected.seen["weights"].values() if weight.numel()):
        return Verdict("discarded", "the training diverges, and differences in the last bit grow with it")
    accumulates = case.options.accumulate_grad_batches > 1 or "accumulation" in case.callbacks
    hidden = (*OWN_PART, *UNSUMMED * accumulates) if spread.is_of_ranks else ()

    def compared(name: str, one: Observed) -> Any:
        return _comparable(name, one.seen.get(name), case, spread)

    names = [name for name in expected.seen if name not in hidden]
    mine, theirs = ({name: compared(name, one) for name in names} for one in (found[0], expected))
    unlike = differences(mine, theirs, partial(_alike, tolerance=tolerance))
    for rank, one in enumerate(found[1:], 1):
        mine, theirs = ({name: of.seen[name] for name in ("weights", "steps", "rates")} for of in (one, found[0]))
        unlike |= differences(mine, theirs, alike, f"rank {rank}")
    for place, pair in unlike.items():
        return Verdict("wrong", f"{'.'.join(map(str, place))}: {_text(pair[1])} expected, {_text(pair[0])} found")
    return Verdict("equal")


def _comparable(name: str, value: Any, case: Case, spread: Spread) -> Any:
    """What is compared of a value."""
    if name == "outputs" and spread.kind != "single_device":
        value = _scalars(value)
    if name == "checkpoint" and spread.kind != "single_device":
        value = _without(value, ("callbacks",))  # the number of devices, and the epoch's running sums
    elif name == "checkpoint" and case.options.max_steps > 0:
        # steps that are used up within an epoch leave its rest to the run that goes on; Lightning ends the epoch
        value = _without(value, AFTER_THE_LAST_STEP)
    predicted = name == "predict" or (name == "before" and case.before == "predict")
    if predicted and spread.is_of_ranks:
        value = _joined(value, case.returns.predict, case.loading.eval_kind in SEVERAL)
    local = _local_names(case) if spread.is_of_ranks else ()
    local += ("balance/",) * spread.kind.startswith("balanced")  # what devices were measured to do
    return _without(value, local)


def _local_names(case: Case) -> tuple[str, ...]:
    """Keys of values that a module logs by step without `sync_dist`: documented to be a rank's own."""
    train = [log for log in case.logs if log.where == "train"]
    return tuple(
        f"train_{i}_{log.value}" for i, log in enumerate(train) if not log.sync_dist and log.on_step is not False
    )


def _without(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _without(item, names) for key, item in value.items() if not str(key).startswith(names)}
    if isinstance(value, list):
        of_logger = [isinstance(item, list) and len(item) == 3 and isinstance(item[1], str) for item in value]
        rows = [item for item, row in zip(value, of_logger, strict=True) if not (row and item[1].startswith(names))]
        return [_without(item, names) for item in rows]
    return value


ROWS = ("list", "tuple_of_rows", "strings", "python_list", "ragged", "dicts")


def _joined(predictions: Any, kind: str, several: bool) -> Any:
    """Predictions without the bounds of batches, which differ where the loader's batch is the global one."""
    try:
        if several:
            return [_joined(one, kind, False) for one in predictions]
        if kind in ROWS:
            return [row for batch in predictions for row in batch]
        if kind == "tensor":
            return torch.cat(predictions)
        if kind == "tuple":
            return [torch.cat(list(leaf)) for leaf in zip(*predictions, strict=True)]
        if kind == "dict":
            return {key: torch.cat([batch[key] for batch in predictions]) for key in predictions[0]}
    except TypeError:  # no predictions
        return predictions
    return None  # a value per batch: there are more batches


def _scalars(value: Any) -> Any:
    """What is documented to reach callbacks from `training_step`: the loss and scalars."""
    if isinstance(value, list):
        return [_scalars(item) for item in value]
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if not isinstance(item, (list, dict))}
        return {key: item for key, item in kept.items() if not torch.is_tensor(item) or item.ndim == 0}
    return value


def _text(one: Any) -> str:
    return f"{one.tolist()!s:.200} ({one.dtype})" if torch.is_tensor(one) else f"{one!r:.200}"


def _alike(found: Any, expected: Any, tolerance: float) -> bool:
    if not torch.is_tensor(expected) and not torch.is_tensor(found):
        tolerance = max(tolerance, 1e-6)  # perhaps of a float32 value
    if torch.float32 in (getattr(one, "dtype", None) for one in (found, expected)):
        tolerance = max(tolerance, TOLERANCES["float32"])  # in which torchmetrics computes, whatever the module's dtype
    return alike(found, expected, tolerance, tolerance)
