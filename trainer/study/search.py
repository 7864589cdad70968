"""Search hyperparameters with Optuna (`hparams_search=optuna`)."""

import importlib
import importlib.util
import logging
import math
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
from ..config.composing import leaves
from ..job.log_file import run_log
from ..job.result import DIVERGED, FAILED, Result
from .sweep import Variant, show

log = logging.getLogger(__name__)

ALLOWED = "choice(a,b), range(1,9), interval(0.1,0.9) or tag(log,interval(0.001,0.1))"

PRUNED_AT = "pruned_at"
"""The attribute of a pruned trial: the validation after which it ended."""


class PruneTrial(pl.Callback):
    """End a trial of a search whose monitored metric is worse than the other trials', by Optuna's pruner; None reports.

    Rank 0 reports the metric `monitor` after every validation, to the trial of a number in a study that Optuna keeps
    in a storage, and decides for all ranks.
    """

    def __init__(self, storage: str, study: str, number: int, monitor: str, pruner: Any = None) -> None:
        self.storage, self.study, self.number = storage, study, number
        self.monitor, self.pruner = monitor, pruner
        self.num_reported = 0
        self._trial: Any = None

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        value, ends = trainer.callback_metrics.get(self.monitor), False
        if trainer.sanity_checking or value is None:
            return
        if trainer.is_global_zero:
            if self._trial is None:
                optuna = importlib.import_module("optuna")
                study = optuna.load_study(study_name=self.study, storage=opened(self.storage), pruner=self.pruner)
                self._trial = optuna.Trial(study, study.trials[self.number]._trial_id)
            self._trial.report(float(value), step=self.num_reported)
            self.num_reported += 1
            ends = self.pruner is not None and (math.isnan(value) or bool(self._trial.should_prune()))
            if ends:
                self._trial.set_user_attr(PRUNED_AT, self.num_reported)
        trainer.should_stop = trainer.should_stop or bool(trainer.strategy.broadcast(ends))


def opened(storage: str) -> Any:
    """What keeps a search's trials: a file that several processes may write, or a database."""
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
        self.optuna = importlib.import_module("optuna")
        self.optuna.logging.set_verbosity(self.optuna.logging.ERROR)  # failed trials are told here
        self.cfg, self.options, self.run_dir = cfg, cfg.hparams_search, run_dir
        given = leaves(plain(self.options.space) or {})  # null removes one
        self.space = {key: self._distribution(key, text) for key, text in given if text not in (None, {})}
        if not self.space:
            raise ConfigError(f"hparams_search.space is empty. Give keys with {ALLOWED}.")
        self.storage = str(self.options.storage or run_dir / "optuna.log")
        self.results: dict[int, Result] = {}
        self.study: Any = None

    def execute(self, train: Callable[[DictConfig], Result]) -> float:
        """Run the trials by `train`, show their table, and return the best value of the monitored metric."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        maximizes = self.cfg.monitor_mode == "max"
        self.study = self.optuna.create_study(
            study_name=str(self.cfg.name),
            storage=opened(self.storage),
            sampler=instantiate("hparams_search.sampler", self.options.sampler) if self.options.sampler else None,
            pruner=self.optuna.pruners.NopPruner(),  # trials are pruned by their own callback
            direction="maximize" if maximizes else "minimize",
            load_if_exists=True,
        )
        num_before = sum(trial.state.name != "WAITING" for trial in self.study.trials)

        def objective(trial: Any) -> float:
            values = {key: trial._suggest(key, distribution) for key, distribution in self.space.items()}
            try:
                result = train(self.trial_config(trial.number, values))
            except Exception as exc:
                if isinstance(exc, ConfigError) and trial.number == num_before:
                    raise
                log.warning("trial %d failed: %s", trial.number, str(exc).partition("\n")[0] or type(exc).__name__)
                raise RuntimeError from exc
            self.results[trial.number] = result
            if result.monitored is None:
                raise ConfigError(
                    f"hparams_search: monitor={self.cfg.monitor} was not logged; the run logged "
                    f"{', '.join(sorted(result.metrics)) or 'nothing'}. Set monitor to one of them."
                )
            if PRUNED_AT in self.study.trials[trial.number].user_attrs:
                raise self.optuna.TrialPruned
            return math.nan if result.status == DIVERGED else result.monitored

        def tell(_: Any, trial: Any) -> None:
            best, value = self.best(), last_value(trial)
            told = "" if value is None else f" {self.cfg.monitor} {value:.4g}"
            told += "" if best is None else f" · best {best.value:.4g} (trial {best.number})"
            log.info("trial %d: %s%s", trial.number, trial.state.name.lower(), told)

        bounds = {"n_trials": self.options.num_trials - num_before, "timeout": self.options.timeout_s}
        try:
            with run_log(self.run_dir):
                self.study.optimize(objective, **bounds, catch=(RuntimeError,), callbacks=[tell])
        finally:
            show(self.run_dir / "search.csv", self.variants(), maximizes, "trial")
        if (best := self.best()) is None:
            raise ConfigError(f"hparams_search: none of {len(self.study.trials)} trials finished; see {self.run_dir}.")
        return best.value

    def trial_config(self, number: int, values: Mapping[str, Any]) -> DictConfig:
        """The configuration of one trial, which is also written below its directory, as Hydra does."""
        cfg = self.cfg.copy()
        folder = self.run_dir / f"{number:03d}"
        for key, value in values.items():
            OmegaConf.update(cfg, key, value)
        with open_dict(cfg):
            cfg.run_dir, cfg.test_after_fit, cfg.hparams_search = str(folder), False, None
            report = {"_target_": f"{PruneTrial.__module__}.{PruneTrial.__qualname__}", "monitor": cfg.monitor}
            place = {"storage": self.storage, "study": str(cfg.name), "number": number, "pruner": self.options.pruner}
            cfg.callbacks = {**(cfg.callbacks or {}), "prune_trial": {**report, **place}}
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
        """The values to try for a key, or the refusal of a key that has none, and of what is no set of values."""
        values: Any = OmegaConf.to_container(self.cfg, resolve=False)
        if key not in (keys := [known for known, _ in leaves(values)]):
            raise ConfigError(
                f"hparams_search.space.{key}: {key} is not a value of the configuration.{did_you_mean(key, keys)} For "
                f"a group run one search for each choice: -m {key}=a,b hparams_search=optuna."
            )
        make = self.optuna.distributions
        try:
            value: Any = OverridesParser.create().parse_override(f"{key}={text}").value()
            is_log = "log" in getattr(value, "tags", ())
            if isinstance(value, ChoiceSweep):
                return make.CategoricalDistribution([v.text if isinstance(v, QuotedString) else v for v in value.list])
            if isinstance(value, IntervalSweep):
                return make.FloatDistribution(value.start, value.end, log=is_log)
            if isinstance(value, RangeSweep) and all(type(n) is int for n in (value.start, value.stop, value.step)):
                numbers: Any = range(int(value.start or 0), int(value.stop or 0), int(value.step))
                step = 1 if is_log else numbers.step
                return make.IntDistribution(numbers[0], numbers[-1], log=is_log, step=step)
            raise ValueError("it is not a set of values")
        except (HydraException, ValueError, IndexError) as exc:
            raise ConfigError(f"hparams_search.space.{key}={text}: {exc}. Give {ALLOWED}.") from exc


def last_value(trial: Any) -> float | None:
    """A trial's value, or of a pruned one the last that it reported."""
    reported = trial.intermediate_values
    return reported[max(reported)] if trial.value is None and reported else trial.value
