"""Train a few steps with every strategy on the user's module and data, and recommend one (`mode=compare`)."""

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from ...strategies import STRATEGIES, ConfigError
from ...strategies.core.errors import did_you_mean
from ..config.checks import QUIET, plain
from ..config.group_files import PACKAGE
from ..job.log_file import run_log
from ..job.result import new_table, print_table, short_path, write_json
from .trial import OK, Probe, Trial, run_trial

REFERENCE = "single_device"
"""The strategy that the others are compared with."""

VARIANTS = {"ddp_global_view": "ddp strategy.global_view=true"}
"""Further rows, with the strategy and the options that each tries."""

TOLERANCES = {"64": 1e-8, "32": 1e-4, "16": 3e-2}
"""Largest allowed relative difference of losses, by bits of the precision; optimizer steps amplify rounding."""

NOISE = 0.05
"""Relative difference of speeds below which two strategies count as equally fast."""


@dataclass(frozen=True)
class Comparison:
    """The outcome of `mode=compare`.

    Args:
        trials: one per strategy, in order; the losses of the first that trained are the reference.
        differences: largest relative difference from the reference's losses, by strategy; the reference's is 0.
        tolerance: the largest difference that rounding explains.
        recommended: the strategy to use; None if none trained.
        reason: why it is recommended.
    """

    trials: list[Trial]
    differences: dict[str, float]
    tolerance: float
    recommended: str | None
    reason: str


def judge(trials: list[Trial], tolerance: float, device_mib: float | None = None) -> Comparison:
    """Compare losses, which count as equal within the tolerance, and recommend a strategy.

    Those of the global view have no excuse: it trains as one device does.
    """
    trained = [trial for trial in trials if trial.status == OK]
    differences = {trial.strategy: largest_difference(trial, trained[0]) for trial in trained}
    trials = [replace(t, excuses=[]) if t in trained[:1] or t.strategy in VARIANTS else t for t in trials]
    sound = [t for t in trials if t.status == OK and (differences[t.strategy] <= tolerance or t.excuses)]
    return Comparison(trials, differences, tolerance, *recommend(sound, device_mib))


def largest_difference(trial: Trial, reference: Trial) -> float:
    """The largest difference between the losses of two trials, relative to the reference's largest loss."""
    if len(trial.losses) != len(reference.losses):
        return math.inf
    scale = max(map(abs, reference.losses), default=1.0) or 1.0
    differences = [abs(a - b) / scale for a, b in zip(trial.losses, reference.losses, strict=True)]
    return math.inf if any(map(math.isnan, differences)) else max(differences, default=0.0)


def recommend(trials: list[Trial], device_mib: float | None) -> tuple[str | None, str]:
    """Choose among strategies that train alike, and that need at most `device_mib` of memory; say why.

    The fastest wins. Among strategies as fast within the noise, the one with the lowest peak memory wins; if that is
    equal too, the earlier one, which is simpler.
    """
    fitting = [trial for trial in trials if device_mib is None or trial.peak_mib <= device_mib]
    if not fitting:
        return None, "no strategy trained" + (" within device_memory_gb" if trials else "") + "; see the reasons above"
    fastest = max(trial.samples_per_s for trial in fitting)
    equal = [trial for trial in fitting if trial.samples_per_s >= (1 - NOISE) * fastest]
    least = min(trial.peak_mib for trial in equal)
    best = next(trial for trial in equal if trial.peak_mib <= (1 + NOISE) * least)
    if rivals := [trial.strategy for trial in equal if trial is not best]:
        merit = "simpler" if best is equal[0] else "its peak memory per device is lower"
        return best.strategy, f"it is as fast as {', '.join(rivals)} (within {NOISE:.0%}), and {merit}"
    return best.strategy, f"it is the fastest of {len(fitting)} that train alike"


def show_comparison(comparison: Comparison, run_dir: str) -> None:
    """Print the table of what trained, the strategies that did not train and why, and the recommendation."""
    table, trained = None, [trial for trial in comparison.trials if trial.status == OK]
    if trained:
        first = trained[0]
        title = f"compare: global batch {first.global_batch} samples, {len(first.losses)} steps"
        headings = ("strategy", "processes", "samples/s", f"× {first.strategy}", "peak MiB", "losses")
        table = new_table(title, headings, text=("strategy", "losses"))
        for trial in trained:
            ratio = f"{trial.samples_per_s / first.samples_per_s:.2f}" if first.samples_per_s else ""
            speed, losses = f"{trial.samples_per_s:,.0f}", verdict(comparison, trial)
            table.add_row(trial.strategy, str(trial.num_processes), speed, ratio, f"{trial.peak_mib:,.0f}", losses)
    print_table(table, [*notes(comparison), recommendation(comparison), f"logs: {short_path(run_dir)}"])


def verdict(comparison: Comparison, trial: Trial) -> str:
    """Whether a strategy's losses equal the reference's."""
    difference = comparison.differences[trial.strategy]
    if not trial.losses:
        return "not checked: training_step returns no loss"
    if trial.strategy == next(iter(comparison.differences)):
        return f"{trial.losses[0]:.4g} to {trial.losses[-1]:.4g}"
    if difference <= comparison.tolerance:
        return f"equal (to {difference:.0e})"
    return f"{'differ, see below' if trial.excuses else 'DIFFER'} ({difference:.0e})"


def notes(comparison: Comparison) -> list[str]:
    """Explain why strategies did not train, and why losses differ."""
    told: list[str] = []
    for trial in comparison.trials:
        difference = comparison.differences.get(trial.strategy, 0.0)
        if trial.status != OK:
            told.append(f"{trial.strategy} {trial.status}: {trial.reason}")
        elif difference > comparison.tolerance:
            cause = "; ".join(trial.excuses) or "the cause is unknown, so it is not recommended; please report it"
            told.append(
                f"{trial.strategy}: losses differ by {difference:.1e} (allowed: {comparison.tolerance:.0e}): {cause}."
            )
    return told


def recommendation(comparison: Comparison) -> str:
    """Format the recommendation."""
    if comparison.recommended is None:
        return f"No recommendation: {comparison.reason}."
    chosen = VARIANTS.get(comparison.recommended, comparison.recommended)
    return f"Recommended: strategy={chosen}, because {comparison.reason}."


log = logging.getLogger(__name__)


def compare_strategies(cfg: DictConfig) -> Comparison:
    """Try strategies one after the other, each in its own process, and write `compare.json` into the run directory.

    Args:
        cfg: resolved (`prepare`).
    """
    names, steps, warmup = chosen_strategies(cfg), cfg.compare.steps, cfg.compare.warmup_steps
    if not 1 <= warmup < steps:
        raise ConfigError(
            f"compare.steps={steps} with compare.warmup_steps={warmup} leaves too few steps to measure. Give "
            "warmup_steps >= 1 and more steps."
        )
    trials = list[Trial]()
    with run_log(cfg.run_dir):
        log.info("compare: %d strategies: %s", len(names), ", ".join(names))
        for number, name in enumerate(names, start=1):
            folder = Path(cfg.run_dir) / "compare" / name
            trial = run_trial(trial_config(cfg, name, folder), name, cfg.compare.timeout_s)
            found = f"{trial.samples_per_s:,.0f} samples/s, {trial.peak_mib:,.0f} MiB"
            log.info(f"{number} of {len(names)}  {name:<28} {found if trial.status == OK else trial.status}")
            trials.append(trial)
    limit = cfg.get("device_memory_gb")
    tolerance = next((most for bits, most in TOLERANCES.items() if bits in str(cfg.precision)), TOLERANCES["16"])
    comparison = judge(trials, tolerance, limit and limit * 1e9 / 2**20)
    write_json(comparison, Path(cfg.run_dir) / "compare.json")
    return comparison


def chosen_strategies(cfg: DictConfig) -> list[str]:
    """List the strategies to try, the reference first, or refuse an unknown one."""
    known, given = [*STRATEGIES, *VARIANTS], plain(cfg.compare.strategies)
    names = known if given is None else [str(name) for name in given]
    for name in names:
        if name not in known:
            suggestion = did_you_mean(name, known)
            raise ConfigError(f"compare.strategies: {name} is unknown. Choose from {', '.join(known)}.{suggestion}")
    return [REFERENCE, *(name for name in dict.fromkeys(names) if name != REFERENCE)]


def trial_config(cfg: DictConfig, name: str, folder: Path) -> DictConfig:
    """The configuration of a few measured steps with one strategy, which write to a folder.

    It has the same module, data, devices, precision, accumulation and clipping, a probe as its only callback, and
    neither logger nor checkpoints. The loader's batch is the global one for all strategies.
    """
    probe = {"_target_": f"{Probe.__module__}.{Probe.__qualname__}", "folder": str(folder)}
    steps = {"max_steps": cfg.compare.steps, "max_epochs": -1, "fast_dev_run": False, "log_every_n_steps": 10**9}
    changes: dict[str, Any] = {
        "mode": "fit", "resume": None, "run_dir": str(folder), "logger": None, "checkpoint": None,
        "seed": 0 if cfg.seed is None else cfg.seed,  # all trials start with the same weights
        "test_after_fit": False, "strategy": strategy_options(cfg, name),
        "callbacks": {"probe": {**probe, "warmup_steps": cfg.compare.warmup_steps}},
        "trainer": {**plain(cfg.trainer), **QUIET, **steps, "default_root_dir": str(folder)},
    }  # fmt: skip
    if name == REFERENCE:
        devices = plain(cfg.devices)
        changes["devices"] = changes["trainer"]["devices"] = devices[:1] if isinstance(devices, list) else 1
    if cfg.get("launcher"):
        changes["launcher"] = {**plain(cfg.launcher), "max_restarts": 0}
    return OmegaConf.create({**cfg, **changes})


def strategy_options(cfg: DictConfig, name: str) -> DictConfig:
    """The options of one strategy: the user's if it is the configured one, otherwise those of `conf/strategy`.

    `compare.options.<name>` overrides them, and batch_size_is is always global.
    """
    base, *more = VARIANTS.get(name, name).split(" strategy.")
    is_users = str(cfg.strategy.get("_target_", "")).rpartition(".")[2] == STRATEGIES[base].__name__
    options: Any = cfg.strategy.copy() if is_users else OmegaConf.create(PACKAGE.values(f"strategy/{base}"))
    with open_dict(options):
        options.merge_with(OmegaConf.from_dotlist(more))
        options.merge_with((cfg.compare.get("options") or {}).get(name) or {})
        if "batch_size_is" in options:
            options.batch_size_is = "global"
    return options
