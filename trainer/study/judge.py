"""Check whether strategies trained alike, and recommend one."""

from dataclasses import dataclass, field

from .trial import OK, Trial

REFERENCE = "single_device"
"""The strategy that the others are compared with."""

TOLERANCES = {"64": 1e-8, "32": 1e-4, "16": 3e-2}
"""Largest allowed relative difference of losses, by bits of the precision; optimizer steps amplify rounding."""

NOISE = 0.05
"""Relative difference of speeds below which two strategies count as equally fast."""


@dataclass(frozen=True)
class Comparison:
    """The outcome of `mode=compare`.

    Args:
        trials: one per strategy, in order.
        reference: the strategy whose losses are the reference; None if none trained.
        differences: largest relative difference from the reference's losses, by strategy; the reference's is 0.
        tolerance: the largest difference that rounding explains.
        excuses: known reasons for which a strategy's losses may differ, by strategy.
        recommended: the strategy to use; None if none trained.
        reason: why it is recommended.
        doubts: which speeds can't be, so that they are not compared.
    """

    trials: list[Trial]
    reference: str | None
    differences: dict[str, float]
    tolerance: float
    excuses: dict[str, list[str]]
    recommended: str | None
    reason: str
    doubts: list[str] = field(default_factory=list[str])


def tolerance_of(precision: str) -> float:
    """The largest relative difference between losses that rounding explains at a precision."""
    return next((limit for bits, limit in TOLERANCES.items() if bits in precision), TOLERANCES["16"])


def is_too_fast(trial: Trial, trials: list[Trial], num_devices: int) -> bool:
    """Whether a strategy was more than N times as fast on N devices as one device: the machine was busy."""
    one = trials[0].samples_per_s if trials and trials[0].strategy == REFERENCE else 0.0
    return trial.strategy != REFERENCE and 0 < num_devices * one < trial.samples_per_s


def judge(
    trials: list[Trial], tolerance: float, device_bytes: float | None = None, num_devices: int = 10**9
) -> Comparison:
    """Compare losses, which count as equal within the tolerance, and recommend a strategy."""
    trained = [trial for trial in trials if trial.status == OK]
    reference = trained[0] if trained else None
    differences = {trial.strategy: largest_difference(trial, trained[0]) for trial in trained}
    excuses = {trial.strategy: excuses_of(trial, trained[0]) for trial in trained}
    sound = [t for t in trained if differences[t.strategy] <= tolerance or excuses[t.strategy]]
    doubted = [t for t in trained if is_too_fast(t, trained, num_devices)]
    doubts = [
        f"{t.strategy}: {t.samples_per_s / trained[0].samples_per_s:.1f} times one device on {num_devices} devices "
        "can't be, also when measured again: the machine is busy. Try with more compare.steps."
        for t in doubted
    ]
    recommended, reason = recommend([t for t in sound if t not in doubted], device_bytes)
    name = None if reference is None else reference.strategy
    return Comparison(trials, name, differences, tolerance, excuses, recommended, reason, doubts)


def largest_difference(trial: Trial, reference: Trial) -> float:
    """The largest difference between the losses of two trials, relative to the reference's largest loss."""
    if len(trial.losses) != len(reference.losses):
        return float("inf")
    scale = max((abs(loss) for loss in reference.losses), default=1.0) or 1.0
    pairs = zip(trial.losses, reference.losses, strict=True)
    differences = [abs(a - b) / scale for a, b in pairs]
    # comparisons with nan are false: a nan loss must not count as equal
    return max((d if d == d else float("inf") for d in differences), default=0.0)


def excuses_of(trial: Trial, reference: Trial) -> list[str]:
    """List known reasons for which a strategy's losses may differ from the reference's (the exceptions of law 1)."""
    if trial is reference:
        return []
    found: list[str] = []
    if trial.num_batchnorms:
        found.append(f"{trial.num_batchnorms} BatchNorm layers normalize chunk by chunk (no sync_batchnorm)")
    if trial.num_dropouts:
        found.append(f"{trial.num_dropouts} dropout layers draw different random numbers")
    elif trial.draws or reference.draws:
        found.append("the training step draws random numbers, which differ between strategies")
    return found


def recommend(trials: list[Trial], device_bytes: float | None) -> tuple[str | None, str]:
    """Choose among strategies that train alike.

    The fastest wins. Among strategies as fast within the noise, the one with the lowest peak memory wins; if that is
    equal too, the earlier one, which is simpler.

    Args:
        device_bytes: memory of a device; strategies that need more are excluded.

    Returns:
        Name and reason; None and the reason if no strategy can be recommended.
    """
    fitting = [trial for trial in trials if device_bytes is None or trial.peak_bytes <= device_bytes]
    if not fitting:
        return None, "no strategy trained" + (" within device_memory_gb" if trials else "") + "; see the reasons above"
    fastest = max(fitting, key=lambda trial: trial.samples_per_s)
    equal = [trial for trial in fitting if trial.samples_per_s >= (1 - NOISE) * fastest.samples_per_s]
    least = min(trial.peak_bytes for trial in equal)
    best = next(trial for trial in equal if trial.peak_bytes <= (1 + NOISE) * least)
    return best.strategy, explain(best, fitting, equal)


def explain(best: Trial, trials: list[Trial], equal: list[Trial]) -> str:
    """Say why a strategy was chosen among those as fast as the fastest."""
    others = [trial for trial in trials if trial is not best]
    if not others:
        return "it is the only one that trained"
    rivals = [trial for trial in equal if trial is not best]
    if rivals:
        merit = "simpler" if best is equal[0] else "its peak memory per device is lower"
        return f"it is as fast as {', '.join(t.strategy for t in rivals)} (within {NOISE:.0%}), and {merit}"
    second = max(others, key=lambda trial: trial.samples_per_s)
    ratio = f"{best.samples_per_s / second.samples_per_s:.2f} times as fast as" if second.samples_per_s else "ahead of"
    if best.strategy == REFERENCE:
        return f"more devices are not faster at this batch size: it is {ratio} the next, {second.strategy}"
    return f"it is the fastest of {len(trials)} that train alike, {ratio} {second.strategy}"
