"""Search hyperparameters with Optuna (`hparams_search=optuna`)."""

import importlib
import importlib.util
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, QuotedString, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from typing_extensions import override

from ...strategies import ConfigError
from ...strategies.core.errors import did_you_mean
from ..config.checks import instantiate, plain, strategy_name
from ..config.group_files import leaves
from ..job.log_file import run_log
from ..job.result import DIVERGED, FAILED, Result
from .sweep import Variant, show

log = logging.getLogger(__name__)

ALLOWED = "choice(a,b), range(1,9), interval(0.1,0.9) or tag(log,interval(0.001,0.1))"

PRUNED_AT = "pruned_at"
"""The attribute of a pruned trial: the validation after which it ended."""


class PruneTrial(pl.Callback):
    """End a trial of a search for hyperparameters whose monitored metric is worse than the other trials'.

    Rank 0 reports the metric `monitor` after every validation, to the trial of a number in a study that Optuna keeps
    in a storage, and decides for all ranks by Optuna's pruner; None only reports.
    """

    def __init__(self, storage: str, study: str, number: int, monitor: str, pruner: Any = None) -> None:
        self.storage, self.study, self.number = storage, study, number
        self.monitor, self.pruner = monitor, pruner
        self.num_reported = 0
        self._trial: Any = None

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the metric, and stop training if the trial is pruned."""
        value = trainer.callback_metrics.get(self.monitor)
        if trainer.sanity_checking or value is None:
            return
        ends = False
        if trainer.is_global_zero:
            trial = self._trial = self._trial or self._load()
            trial.report(float(value), step=self.num_reported)
            self.num_reported += 1
            ends = self.pruner is not None and (math.isnan(value) or bool(trial.should_prune()))
            if ends:
                trial.set_user_attr(PRUNED_AT, self.num_reported)
        trainer.should_stop = trainer.should_stop or bool(trainer.strategy.broadcast(ends))

    def _load(self) -> Any:
        optuna = importlib.import_module("optuna")
        study = optuna.load_study(study_name=self.study, storage=open_storage(self.storage), pruner=self.pruner)
        return optuna.Trial(study, study.trials[self.number]._trial_id)


def open_storage(storage: str) -> Any:
    """Open what keeps a search's trials: a file that several processes may write, or a database."""
    if "://" in storage:
        return storage
    backend = importlib.import_module("optuna.storages.journal").JournalFileBackend(storage)
    return importlib.import_module("optuna.storages").JournalStorage(backend)


class Search:
    """A search for the hyperparameters with the best monitored metric, in a directory with one for each trial."""

    def __init__(self, cfg: DictConfig, run_dir: Path) -> None:
        if importlib.util.find_spec("optuna") is None:
            raise ConfigError(
                "hparams_search=optuna needs the package optuna, which is not installed. Run pip install "
                "'evener[optuna]', or sweep a grid with -m."
            )
        if cfg.mode != "fit":
            raise ConfigError(f"hparams_search: mode must be fit; got mode={cfg.mode}. Remove hparams_search.")
        self.cfg, self.run_dir = cfg, run_dir
        self.options: DictConfig = cfg.hparams_search
        self.optuna = importlib.import_module("optuna")
        self.optuna.logging.set_verbosity(self.optuna.logging.WARNING)
        given = leaves(plain(self.options.space) or {})  # null removes one
        self.space = {key: self._distribution(key, text) for key, text in given if text not in (None, {})}
        if not self.space:
            raise ConfigError(f"hparams_search.space is empty. Give keys with {ALLOWED}.")
        self.storage = str(self.options.storage or run_dir / "optuna.log")
        self.maximizes = cfg.monitor_mode == "max"
        self.results: dict[int, Result] = {}
        self.study: Any = None

    def execute(self, train: Callable[[DictConfig], Result]) -> float:
        """Run the trials by `train`, show their table, and return the best value of the monitored metric."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.study = self.optuna.create_study(
            study_name=str(self.cfg.name),
            storage=open_storage(self.storage),
            sampler=instantiate("hparams_search.sampler", self.options.sampler) if self.options.sampler else None,
            pruner=self.optuna.pruners.NopPruner(),  # trials are pruned by their own callback
            direction="maximize" if self.maximizes else "minimize",
            load_if_exists=True,
        )
        try:
            with run_log(self.run_dir):
                self._run(train)
        finally:
            show(self.run_dir / "search.csv", self.variants(), self.maximizes, "trial")
        if (best := self.best()) is None:
            raise ConfigError(f"hparams_search: none of {len(self.study.trials)} trials finished; see {self.run_dir}.")
        return best.value

    def _run(self, train: Callable[[DictConfig], Result]) -> None:
        """Run the trials one after the other; one that fails is recorded, and the others go on."""
        began_s, limit_s = time.monotonic(), self.options.timeout_s
        num_before = sum(trial.state.name != "WAITING" for trial in self.study.trials)
        for _ in range(num_before, self.options.num_trials):
            if limit_s is not None and time.monotonic() - began_s > limit_s:
                log.info("hparams_search: no further trial begins after timeout_s=%s", limit_s)
                break
            trial = self.study.ask(self.space)
            try:
                result = train(self.trial_config(trial.number, trial.params))
            except Exception as exc:
                self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
                if isinstance(exc, ConfigError) and trial.number == num_before:
                    raise
                log.warning("trial %d failed: %s", trial.number, str(exc).partition("\n")[0] or type(exc).__name__)
                continue
            ended, best = self._finish(trial, result), self.best()
            told = f"trial {trial.number}: {ended.state.name.lower()}"
            told += "" if (value := last_value(ended)) is None else f" {self.cfg.monitor} {value:.4g}"
            log.info(told + ("" if best is None else f" · best {best.value:.4g} (trial {best.number})"))

    def _finish(self, trial: Any, result: Result) -> Any:
        """Tell Optuna how a trial ended, and return it as Optuna keeps it."""
        self.results[trial.number] = result
        states, value = self.optuna.trial.TrialState, result.monitored
        failed = value is None or result.status == DIVERGED or math.isnan(value)
        if value is not None and PRUNED_AT in self.study.trials[trial.number].user_attrs:
            state = states.PRUNED
        else:
            state = states.FAIL if failed else states.COMPLETE
        ended = self.study.tell(trial, value if state == states.COMPLETE else None, state)
        if value is None:
            raise ConfigError(
                f"hparams_search: monitor={self.cfg.monitor} was not logged; the run logged "
                f"{', '.join(sorted(result.metrics)) or 'nothing'}. Set monitor to one of them."
            )
        return ended

    def trial_config(self, number: int, values: Mapping[str, Any]) -> DictConfig:
        """The configuration of one trial, which is also written below its directory, as Hydra does."""
        cfg = self.cfg.copy()
        folder = self.run_dir / f"{number:03d}"
        for key, value in values.items():
            OmegaConf.update(cfg, key, value)
        with open_dict(cfg):
            cfg.run_dir, cfg.test_after_fit = str(folder), False
            cfg.hparams_search = None
            report = {"_target_": f"{PruneTrial.__module__}.{PruneTrial.__qualname__}", "monitor": cfg.monitor}
            place = {"storage": self.storage, "study": str(cfg.name), "number": number}
            pruner = {"pruner": self.options.pruner} if self.options.pruner else {}
            cfg.callbacks = {**(cfg.callbacks or {}), "prune_trial": {**report, **place, **pruner}}
        (folder / ".hydra").mkdir(parents=True, exist_ok=True)
        OmegaConf.save(cfg, folder / ".hydra" / "config.yaml")
        OmegaConf.save([f"{key}={value}" for key, value in values.items()], folder / ".hydra" / "overrides.yaml")
        return cfg

    def best(self) -> Any:
        """The trial with the best value; None if none finished."""
        return self.study.best_trial if any(t.state.name == "COMPLETE" for t in self.study.trials) else None

    def variants(self) -> list[Variant]:
        """The trials as rows of the table; a pruned one has its last value."""
        strategy, states = strategy_name(self.cfg), {"COMPLETE": "", "FAIL": FAILED}
        rows: list[Variant] = []
        for trial in self.study.trials:
            shown = ((key, trial.params[key]) for key in self.space if key in trial.params)
            words = tuple(f"{key}={f'{v:.4g}' if isinstance(v, float) else v}" for key, v in shown)
            state, result = states.get(name := str(trial.state.name), name.lower()), self.results.get(trial.number)
            rows.append(Variant(trial.number, strategy, words, last_value(trial), state, result))
        return rows

    def _distribution(self, key: str, text: Any) -> Any:
        self._verify_key(key)
        try:
            value: Any = OverridesParser.create().parse_override(f"{key}={text}").value()
        except HydraException:
            value = None
        make = self.optuna.distributions
        is_log = "log" in getattr(value, "tags", ())
        try:
            if isinstance(value, ChoiceSweep):
                return make.CategoricalDistribution([v.text if isinstance(v, QuotedString) else v for v in value.list])
            if isinstance(value, IntervalSweep):
                return make.FloatDistribution(value.start, value.end, log=is_log)
            if isinstance(value, RangeSweep) and all(type(n) is int for n in (value.start, value.stop, value.step)):
                numbers: Any = range(int(value.start or 0), int(value.stop or 0), int(value.step))
                step = 1 if is_log else numbers.step
                return make.IntDistribution(numbers[0], numbers[-1], log=is_log, step=step)
        except (ValueError, IndexError) as exc:
            raise ConfigError(f"hparams_search.space.{key}={text}: {exc}. Give {ALLOWED}.") from exc
        raise ConfigError(f"hparams_search.space.{key}={text} is not a set of values. Give {ALLOWED}.")

    def _verify_key(self, key: str) -> None:
        """Refuse a key that the configuration has not, and a group."""
        values: Any = OmegaConf.to_container(self.cfg, resolve=False)
        keys = [known for known, _ in leaves(values)]
        if any(known.startswith(f"{key}.") for known in keys):
            raise ConfigError(
                f"hparams_search.space.{key} is a group, and values of keys are searched. Run one search for each "
                f"choice: -m {key}=a,b hparams_search=optuna."
            )
        if key not in keys:
            raise ConfigError(
                f"hparams_search.space.{key}: the configuration has no key {key}.{did_you_mean(key, keys)}"
            )


def last_value(trial: Any) -> float | None:
    """A trial's value, or of a pruned one the last that it reported."""
    reported = trial.intermediate_values
    return reported[max(reported)] if trial.value is None and reported else trial.value
