"""Train a few steps with every strategy, each in a process of its own, and recommend one (`mode=compare`)."""

import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from ...strategies import STRATEGIES, ConfigError
from ...strategies.batch.results import loss_weight
from ...strategies.core.devices import has_streams, precise_dtype
from ...strategies.core.errors import did_you_mean
from ...strategies.core.rng import generator_state
from ...strategies.distributed.wrapper import SyncedBatchNorm
from ...strategies.registry import process_devices
from ..callbacks import RunSummary
from ..config.checks import QUIET, LaunchPlan, plain, verify_config
from ..config.composing import PACKAGE
from ..job.log_file import run_log
from ..job.result import FAILED, RESULT_FILE, Result, discard_result, new_table, print_table, short_path, write_json
from ..launch.launcher import begin, can_fork, launch, starting

log = logging.getLogger(__name__)

REFERENCE = "single_device"
"""The strategy that the others are compared with."""

TOLERANCES = {"64": 1e-8, "32": 1e-4, "16": 3e-2}
"""Largest allowed relative difference of losses, by bits of the precision; optimizer steps amplify rounding."""

NOISE = 0.05
"""Relative difference of speeds below which two strategies count as equally fast."""

PROBE_FILE, OUTPUT_FILE = "probe.json", "output.log"
OK, REFUSED = "ok", "refused"
DRAWS = "the training step draws random numbers, which differ between strategies"


class Probe(pl.Callback):
    """Record a training run, and write `probe.json` at its end; no step communicates more than without it."""

    def __init__(self, folder: str, warmup_steps: int) -> None:
        self._file, self._warmup = Path(folder) / PROBE_FILE, warmup_steps
        self._num_batches, self._rate = 0, 0.0
        self._losses: list[tuple[Tensor, Any]] = []
        self._streams: list[Tensor] = []
        self.excuses: list[str] = []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        synced = (nn.SyncBatchNorm, SyncedBatchNorm)
        if num := sum(isinstance(m, _BatchNorm) and not isinstance(m, synced) for m in pl_module.modules()):
            self.excuses.append(f"{num} BatchNorm layers normalize chunk by chunk (no sync_batchnorm)")

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._num_batches == 0:
            self._streams = random_streams(trainer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._num_batches == 0 and not all(map(torch.equal, self._streams, random_streams(trainer))):
            self.excuses.append(DRAWS)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._losses.append((loss.detach().clone(), loss_weight(outputs, batch)))
        self._num_batches += 1
        summary = RunSummary.of(trainer)
        if summary and (self._num_batches == self._warmup or trainer.global_step >= trainer.max_steps):
            for device in filter(has_streams, process_devices(trainer.strategy)):
                torch.accelerator.synchronize(device)
            self._rate = summary.read(1).get("samples_per_s", 0.0)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        device = trainer.strategy.root_device
        # a rank without samples has zero weight, whatever its loss is
        parts = [[float(loss) * float(weight) if weight else 0.0, float(weight)] for loss, weight in self._losses]
        sums: Any = torch.tensor(parts, dtype=precise_dtype(device), device=device)
        if parts:
            sums = trainer.strategy.reduce(sums, reduce_op="sum")
        if trainer.is_global_zero:
            losses = [loss / (weight or 1.0) for loss, weight in sums.tolist()]
            found = {"losses": losses, "samples_per_s": self._rate, "excuses": self.excuses}
            self._file.write_text(json.dumps(found), encoding="utf-8")


def random_streams(trainer: pl.Trainer) -> list[Tensor]:
    """The states of torch's random streams that a step of this process may draw from."""
    return [generator_state(d) for d in dict.fromkeys([torch.device("cpu"), *process_devices(trainer.strategy)])]


@dataclass(frozen=True)
class Trial:
    """The outcome of one strategy's trial, with global losses, and `excuses` why they may differ from another's."""

    strategy: str
    status: str = OK
    reason: str = ""
    losses: list[float] = field(default_factory=list[float])
    global_batch: int = 0
    samples_per_s: float = 0.0
    peak_memory_mib: list[float] = field(default_factory=list[float])
    num_processes: int = 1
    excuses: list[str] = field(default_factory=list[str])

    @property
    def peak_mib(self) -> float:
        """Largest peak of all devices, in MiB."""
        return max(self.peak_memory_mib, default=0.0)

    @classmethod
    def read(cls, folder: Path, strategy: str, ended: str) -> "Trial":
        """Read the outcome from a trial's folder; `ended` says how it ended if it has left none."""
        result = Result.read(folder) if (folder / RESULT_FILE).exists() else None
        if result is not None and result.refused:
            return cls(strategy, REFUSED, str(result.reason))
        if result is None or result.status == FAILED:
            return cls(strategy, FAILED, f"{result.reason if result else ended}; see {folder / OUTPUT_FILE}")
        if result.global_batch is None:
            return cls(strategy, FAILED, "it ran no training step")
        of_run = {name: getattr(result, name) for name in ("global_batch", "num_processes", "peak_memory_mib")}
        return cls(strategy, **of_run, **json.loads((folder / PROBE_FILE).read_text(encoding="utf-8")))


def run_trial(cfg: DictConfig, strategy: str, timeout_s: float) -> Trial:
    """Run a configuration, which has a probe among its callbacks, in a process of its own, at most `timeout_s` s."""
    try:
        verify_config(cfg)
        forks = can_fork(LaunchPlan.of(cfg))
    except ConfigError as exc:
        return Trial(strategy, REFUSED, str(exc))
    folder = Path(cfg.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    discard_result(folder)
    with starting(forks) as context:
        process = context.Process(target=execute, args=(cfg, folder / OUTPUT_FILE))
        process.start()
    try:
        process.join(timeout_s)
    finally:
        if (status := process.exitcode) is None:
            process.kill()  # its workers end with it
            process.join()
    if status is None:
        return Trial(strategy, FAILED, f"it did not finish within compare.timeout_s={timeout_s:g} seconds")
    return Trial.read(folder, strategy, f"its process ended with status {status}")


def execute(cfg: DictConfig, output: Path) -> None:
    """Run a trial's configuration in this process and its workers; what they print goes to a file."""
    sys.stdout = sys.stderr = output.open("w", encoding="utf-8", errors="backslashreplace", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    begin()
    launch(cfg)


@dataclass(frozen=True)
class Comparison:
    """The outcome of `mode=compare`: largest relative `differences` from the losses of the first that trained, by
    strategy; the `tolerance` that rounding explains; and the strategy that is `recommended`, if any trained.
    """

    trials: list[Trial]
    differences: dict[str, float]
    tolerance: float
    recommended: str | None
    reason: str

    @property
    def recommendation(self) -> str:
        """The strategy to use, and why, in one sentence."""
        if self.recommended is None:
            return f"No recommendation: {self.reason}."
        return f"Recommended: strategy={self.recommended}, because {self.reason}."

    def verdict(self, trial: Trial) -> str:
        """Whether a strategy's losses equal the reference's."""
        difference = self.differences[trial.strategy]
        if not trial.losses:
            return "not checked: training_step returns no loss"
        if trial.strategy == next(iter(self.differences)):
            return f"{trial.losses[0]:.4g} to {trial.losses[-1]:.4g}"
        if difference <= self.tolerance:
            return f"equal (to {difference:.0e})"
        return f"{'differ, see below' if trial.excuses else 'DIFFER'} ({difference:.0e})"

    def notes(self) -> list[str]:
        """Explain why strategies did not train, and why losses differ."""
        told = [f"{trial.strategy} {trial.status}: {trial.reason}" for trial in self.trials if trial.status != OK]
        for trial in self.trials:
            if (difference := self.differences.get(trial.strategy, 0.0)) > self.tolerance:
                cause = "; ".join(trial.excuses) or "the cause is unknown, so it is not recommended; please report it"
                allowed = f"(allowed: {self.tolerance:.0e})"
                told.append(f"{trial.strategy}: losses differ by {difference:.1e} {allowed}: {cause}.")
        return told

    def show(self, run_dir: str) -> None:
        """Print the table of what trained, the strategies that did not train and why, and the recommendation."""
        table, trained = None, [trial for trial in self.trials if trial.status == OK]
        for trial in trained:
            first = trained[0]
            if table is None:
                title = f"compare: global batch {first.global_batch} samples, {len(first.losses)} steps"
                headings = ("strategy", "processes", "samples/s", f"× {first.strategy}", "peak MiB", "losses")
                table = new_table(title, headings, text=("strategy", "losses"))
            ratio = f"{trial.samples_per_s / first.samples_per_s:.2f}" if first.samples_per_s else ""
            cells = (f"{trial.samples_per_s:,.0f}", ratio, f"{trial.peak_mib:,.0f}")
            table.add_row(trial.strategy, str(trial.num_processes), *cells, self.verdict(trial))
        print_table(table, [*self.notes(), self.recommendation, f"logs: {short_path(run_dir)}"])


def judge(trials: list[Trial], tolerance: float, device_mib: float | None = None) -> Comparison:
    """Compare losses, and recommend the fastest strategy that fits a device, or the first that is nearly as fast."""
    trained = [trial for trial in trials if trial.status == OK]
    differences = {trial.strategy: largest_difference(trial, trained[0]) for trial in trained}
    sound = [t for t in trained if differences[t.strategy] <= tolerance or t.excuses]
    fitting = [trial for trial in sound if device_mib is None or trial.peak_mib <= device_mib]
    if not fitting:
        reason = f"no strategy trained{' within device_memory_gb' if sound else ''}; see the reasons above"
        return Comparison(trials, differences, tolerance, None, reason)
    fastest = max(trial.samples_per_s for trial in fitting)
    best, *rivals = [trial.strategy for trial in fitting if trial.samples_per_s >= (1 - NOISE) * fastest]
    reason = f"it is the fastest of {len(fitting)} that train alike"
    if rivals:  # they come later, as they are less simple
        reason = f"it is as fast as {', '.join(rivals)} (within {NOISE:.0%}), and simpler"
    return Comparison(trials, differences, tolerance, best, reason)


def largest_difference(trial: Trial, reference: Trial) -> float:
    """The largest difference between the losses of two trials, relative to the reference's largest loss."""
    if len(trial.losses) != len(reference.losses):
        return math.inf
    scale = max(map(abs, reference.losses), default=1.0) or 1.0
    differences = [abs(a - b) / scale for a, b in zip(trial.losses, reference.losses, strict=True)]
    return math.inf if any(map(math.isnan, differences)) else max(differences, default=0.0)


def compare_strategies(cfg: DictConfig) -> Comparison:
    """Try strategies one after the other, and write `compare.json` into the run directory of a resolved `cfg`."""
    names, steps, warmup = chosen_strategies(cfg), cfg.compare.steps, cfg.compare.warmup_steps
    if not 1 <= warmup < steps:
        raise ConfigError(
            f"compare.steps={steps} with compare.warmup_steps={warmup} leaves too few steps to measure. Give "
            "warmup_steps >= 1 and more steps."
        )
    trials = list[Trial]()
    with run_log(cfg.run_dir):
        log.info("compare: %d strategies: %s", len(names), ", ".join(names))
        for number, name in enumerate(names, 1):
            trial = run_trial(
                trial_config(cfg, name, Path(cfg.run_dir) / "compare" / name), name, cfg.compare.timeout_s
            )
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
    known, given = list(STRATEGIES), plain(cfg.compare.strategies)
    names = known if given is None else [str(name) for name in given]
    for name in names:
        if name not in known:
            suggestion = did_you_mean(name, known)
            raise ConfigError(f"compare.strategies: {name} is unknown. Choose from {', '.join(known)}.{suggestion}")
    return list(dict.fromkeys([REFERENCE, *names]))


def trial_config(cfg: DictConfig, name: str, folder: Path) -> DictConfig:
    """The configuration of a few measured steps with one strategy, on the loader's batch, that write to a folder."""
    is_users = str(cfg.strategy.get("_target_", "")).rpartition(".")[2] == STRATEGIES[name].__name__
    options: Any = cfg.strategy.copy() if is_users else OmegaConf.create(PACKAGE.values(f"strategy/{name}"))
    with open_dict(options):
        options.merge_with((cfg.compare.get("options") or {}).get(name) or {})
        if "batch_size_is" in options:
            options.batch_size_is = "global"
    probe = {"_target_": f"{Probe.__module__}.{Probe.__qualname__}", "folder": str(folder)}
    steps = {"max_steps": cfg.compare.steps, "max_epochs": -1, "fast_dev_run": False, "log_every_n_steps": 10**9}
    changes: dict[str, Any] = {
        "mode": "fit", "resume": None, "run_dir": str(folder), "logger": None, "checkpoint": None,
        "seed": 0 if cfg.seed is None else cfg.seed,  # all trials start with the same weights
        "test_after_fit": False, "strategy": options,
        "callbacks": {"probe": {**probe, "warmup_steps": cfg.compare.warmup_steps}},
        "trainer": {**plain(cfg.trainer), **QUIET, **steps, "default_root_dir": str(folder)},
        "launcher": {**plain(cfg.launcher), "max_restarts": 0},
    }  # fmt: skip
    if name == REFERENCE:
        devices = plain(cfg.devices)
        changes["devices"] = changes["trainer"]["devices"] = devices[:1] if isinstance(devices, list) else 1
    return OmegaConf.create({**cfg, **changes})
