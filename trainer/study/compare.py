"""Train a few steps with every strategy on the user's module and data, and recommend one (`mode=compare`)."""

import logging
import time
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from ...strategies import STRATEGIES, ConfigError
from ...strategies.core.device_names import resolve_devices
from ..config.checks import plain
from ..config.group_files import PACKAGE
from ..config.instantiate import QUIET
from ..config.nearest import did_you_mean
from ..job.log_file import run_log
from ..job.result import write_json
from .comparison import REFERENCE, VARIANTS, Comparison, is_too_fast, judge, memory, tolerance_of
from .trial import OK, WINDOW, Probe, Trial, run_trial

log = logging.getLogger(__name__)


def compare_strategies(cfg: DictConfig) -> Comparison:
    """Try strategies one after the other, each in its own process; `cfg` is resolved (`prepare`).

    Returns:
        The comparison, also written as `compare.json` into the run directory.

    Raises:
        ConfigError: an option of `compare` can't be honoured.
    """
    names = chosen_strategies(cfg)
    verify_lengths(cfg)
    num_devices = len(resolve_devices(plain(cfg.devices), cfg.accelerator))
    trials: list[Trial] = []
    began_s = time.monotonic()
    with run_log(cfg.run_dir):
        log.info("compare: %d strategies: %s", len(names), ", ".join(names))
        for name in names:
            trials.append(try_out(cfg, name))
            if is_too_fast(trials[-1], trials, num_devices):
                log.info("compare: %s can't be that fast on %d devices; measured again", name, num_devices)
                trials[0], trials[-1] = try_out(cfg, REFERENCE), try_out(cfg, name)
            log.info(progress_line(trials, len(names), time.monotonic() - began_s))
    limit = cfg.get("device_memory_gb")
    comparison = judge(trials, tolerance_of(str(cfg.precision)), limit and limit * 1e9 / 2**20, num_devices)
    write_json(comparison, Path(cfg.run_dir) / "compare.json")
    return comparison


def try_out(cfg: DictConfig, name: str) -> Trial:
    """Run the trial of one strategy."""
    folder = Path(cfg.run_dir) / "compare" / name
    return run_trial(trial_config(cfg, name, folder), name, cfg.compare.timeout_s)


def progress_line(trials: list[Trial], num_all: int, seconds: float) -> str:
    """One row of the table as it grows: the newest trial's result, how many are done, and the time that is left."""
    trial, rest = trials[-1], num_all - len(trials)
    found = f"{trial.samples_per_s:,.0f} samples/s, {memory(trial)} MiB" if trial.status == OK else trial.status
    left = f", about {seconds / len(trials) * rest:.0f} s left" if rest else ""
    return f"{len(trials)} of {num_all}  {trial.strategy:<28} {found}{left}"


def chosen_strategies(cfg: DictConfig) -> list[str]:
    """List the strategies to try, the reference first.

    Raises:
        ConfigError: a name is unknown.
    """
    known, given = [*STRATEGIES, *VARIANTS], plain(cfg.compare.strategies)
    names = known if given is None else [str(name) for name in given]
    for name in names:
        if name not in known:
            suggestion = did_you_mean(name, known)
            raise ConfigError(f"compare.strategies: {name} is unknown. Choose from {', '.join(known)}.{suggestion}")
    return [REFERENCE, *(name for name in dict.fromkeys(names) if name != REFERENCE)]


def verify_lengths(cfg: DictConfig) -> None:
    """Check that enough steps remain to be measured."""
    steps, warmup = cfg.compare.steps, cfg.compare.warmup_steps
    if not (isinstance(steps, int) and isinstance(warmup, int) and 1 <= warmup <= steps - WINDOW):
        raise ConfigError(
            f"compare.steps={steps} with compare.warmup_steps={warmup} leaves too few steps to measure. Give "
            f"warmup_steps >= 1 and steps >= warmup_steps + {WINDOW}."
        )


def trial_config(cfg: DictConfig, name: str, folder: Path) -> DictConfig:
    """The configuration of a short trial of one strategy; the loader's batch is the global one for all."""
    trial = short_config(cfg, folder)
    trial.strategy = strategy_options(cfg, name)
    if name == REFERENCE:
        devices = plain(cfg.devices)
        trial.devices = trial.trainer.devices = devices[:1] if isinstance(devices, list) else 1
    return trial


def short_config(cfg: DictConfig, folder: Path) -> DictConfig:
    """The configuration of a few measured steps in a folder: the same module, data, devices, precision, accumulation
    and clipping, a probe as its only callback, and neither logger nor checkpoints.
    """
    short = cfg.copy()
    with open_dict(short):
        short.mode, short.resume, short.run_dir = "fit", None, str(folder)
        short.seed = 0 if cfg.seed is None else cfg.seed  # all trials start with the same weights
        short.logger = short.checkpoint = None
        short.test_after_fit = False
        probe = {"_target_": f"{Probe.__module__}.{Probe.__qualname__}", "folder": str(folder)}
        short.callbacks = {"probe": {**probe, "warmup_steps": cfg.compare.warmup_steps}}
        steps = {"max_steps": cfg.compare.steps, "max_epochs": -1, "fast_dev_run": False, "log_every_n_steps": 10**9}
        short.trainer = {**plain(cfg.trainer), **QUIET, **steps, "default_root_dir": str(folder)}
        if short.get("launcher"):
            short.launcher.max_restarts = 0
    return short


def strategy_options(cfg: DictConfig, name: str) -> DictConfig:
    """The options of one strategy: the user's if it is the configured one, otherwise those of `conf/strategy`.

    `compare.options.<name>` overrides them, and batch_size_is is always global.
    """
    base, *more = VARIANTS.get(name, name).split(" strategy.")
    is_users = str(cfg.strategy.get("_target_", "")).rpartition(".")[2] == STRATEGIES[base].__name__
    options = cfg.strategy.copy() if is_users else PACKAGE.options("strategy", base)
    with open_dict(options):
        options.merge_with(OmegaConf.from_dotlist(more))
        options.merge_with((cfg.compare.get("options") or {}).get(name) or {})
        if "batch_size_is" in options:
            options.batch_size_is = "global"
    return options
