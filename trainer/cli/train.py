"""Run a command's jobs: check a configuration, and run its mode; under a launcher rank 0 publishes them."""

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from pytorch_lightning.plugins.environments import ClusterEnvironment, TorchElasticEnvironment
from yaml import YAMLError

from ...strategies import ConfigError
from ...strategies.distributed.processes import die_with_parent
from ..config.checks import strategy_name, verify_config
from ..config.composing import Source, composition_sentence, incomplete, verify_own_data
from ..job.result import DIVERGED, Result, show_summary
from ..job.run import OF_NAME, Run, checkpoint_of_name
from ..launch import cluster
from ..launch.launcher import launch

ADVISORY_MODES = ("compare", "plan")
"""The modes that only advise and return no result."""


def run_under(started_by: ClusterEnvironment, run_hydra: Callable[[], None]) -> None:
    """Run the command in a rank of a launcher: Hydra on rank 0, and the jobs that it publishes on every other."""
    if isinstance(started_by, TorchElasticEnvironment):
        die_with_parent()  # torch's agent leaves its workers behind when it is killed
    rank = started_by.global_rank()
    try:
        if rank == 0:
            sys.argv[1:] = cluster.words_of_rank_0(sys.argv[1:], started_by)
            run_hydra()
        else:
            while (cfg := cluster.receive(started_by)) is not None:
                Run(cfg, rank, started_by.world_size()).execute()
    finally:
        with suppress(ConfigError):  # of the launcher, refused already
            cluster.leave(started_by)


def run_job(cfg: DictConfig, in_sweep: bool = False) -> float | None:
    """Run one job, print its table, and return the monitored metric; in a sweep others follow one that diverged."""
    alone = f"mode={cfg.mode}" if cfg.mode in ADVISORY_MODES else "hparams_search" if cfg.get("hparams_search") else ""
    if alone and cluster.detect_launcher() is not None:
        raise ConfigError(f"{alone} must run in a single process. Start it without torchrun or srun.")
    if cfg.mode == "compare":
        from ..study.compare import compare_strategies

        return compare_strategies(cfg := prepare(cfg)).show(cfg.run_dir)
    if cfg.mode == "plan":
        from ..plan.plan import plan_memory

        return plan_memory(prepare(cfg)).show()
    if alone:
        from ..study.search import Search

        return Search(cfg, Path(with_run_dir(cfg).run_dir).absolute()).execute(train)
    if OmegaConf.select(cfg, "extras.print_config"):
        sys.stdout.write(OmegaConf.to_yaml(cfg, resolve=True))
    result = train(cfg)
    show_summary(result, cfg.log_dir)
    if result.status == DIVERGED and not in_sweep:
        sys.exit(
            "Error: Training diverged: the weights contain nan. Lower the learning rate or set "
            "trainer.gradient_clip_val; trainer.detect_nonfinite=raise stops at the first such step."
        )
    return result.monitored


def train(cfg: DictConfig) -> Result:
    """Run what a configuration describes, in as many processes as its strategy needs.

    Args:
        cfg: composed by Hydra's main or by `compose`; not modified.

    Returns:
        Metrics, checkpoint paths and the run directory.

    Raises:
        ConfigError: an option can't be honoured.
    """
    if not isinstance(cfg, DictConfig) or "mode" not in cfg:  # pyright: ignore[reportUnnecessaryIsInstance]  # users'
        raise ConfigError(f"train: expected a configuration, got {type(cfg).__name__}. Use train(compose([...])).")
    if cfg.mode in ADVISORY_MODES:
        raise ConfigError(
            f"mode={cfg.mode} does not train, so train() has no result to return. Run python train.py mode={cfg.mode}."
        )
    if cfg.get("hparams_search"):
        raise ConfigError("hparams_search runs many trainings, and train() one. Run python train.py hparams_search=...")
    return launch(prepare(cfg))


def prepare(cfg: DictConfig) -> DictConfig:
    """Return a checked copy of a configuration, its interpolations resolved, and create its run directory."""
    cfg = with_run_dir(cfg)
    for key in ("name", "log_dir"):
        if type(cfg[key]) is int:  # name=7
            cfg[key] = str(cfg[key])
    if str(cfg.devices) == "-1":  # the strategies take it on any device; Lightning on accelerators only
        cfg.devices = "auto"
    if cfg.get("config") == "run":
        cfg.module = module_of_run(cfg)
    try:
        cfg = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))  # type: ignore[arg-type]
    except OmegaConfBaseException as exc:
        raise ConfigError(incomplete(cfg, exc)) from exc
    verify_config(cfg)
    folder = Path(cfg.run_dir).absolute()
    cfg.run_dir = str(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.log").touch()
    except OSError as exc:
        raise ConfigError(
            f"run_dir={cfg.run_dir} can't be written ({exc.strerror}). Set log_dir to a writable directory."
        ) from exc
    return cfg


def module_of_run(cfg: DictConfig) -> DictConfig:
    """Read the module's configuration of the run that `resume` names, or refuse another value of one of its options."""
    if cfg.resume is None:
        raise ConfigError("config=run takes the module's configuration from an earlier run. Name it with resume=last.")
    checkpoint = checkpoint_of_name(cfg) if cfg.resume in OF_NAME else Path(cfg.resume)
    files = (folder / ".hydra" / "config.yaml" for folder in checkpoint.absolute().parents[:3])
    file = next((path for path in files if path.is_file()), checkpoint.parent / ".hydra" / "config.yaml")
    try:
        of_run: Any = OmegaConf.load(file)
        module: Any = OmegaConf.create(OmegaConf.to_container(of_run.module, resolve=True))
    except (OSError, ValueError, AttributeError, YAMLError, OmegaConfBaseException) as exc:
        raise ConfigError(
            f"config=run: {file} can't be read ({' '.join(str(exc).split())}). Give the module's options instead."
        ) from exc
    words = list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
    for key in [found[1] for word in words if (found := re.match(r"\+{0,2}module\.(\w+)=", word))]:
        here, there = cfg.module.get(key), module.get(key)
        if here != there:
            raise ConfigError(
                f"config=run takes module.{key}={there} from the run, but module.{key}={here} was given as well. Drop "
                "one of them."
            )
    return module


def with_run_dir(cfg: DictConfig) -> DictConfig:
    """Return a copy that has a run directory outside Hydra's main, too, with the layout of `conf/hydra`."""
    cfg = cfg.copy()
    with suppress(OmegaConfBaseException):  # it defaults to Hydra's output directory
        if cfg.run_dir is not None:
            return cfg
    folder = Path(str(cfg.log_dir)) / str(cfg.name) / strategy_name(cfg)
    with open_dict(cfg):
        cfg.run_dir = str(folder / datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f"))
    return cfg


def compose(
    overrides: Sequence[str] = (), config_name: str = "train", config_dir: str | Path | None = None
) -> DictConfig:
    """Compose a configuration in Python, like the command line.

    Args:
        overrides: such as `["strategy=ddp", "devices=2"]`.
        config_name: the root configuration.
        config_dir: a project's own configuration directory, as for `main`, but relative to the current directory; None
            uses the configuration of this package.

    Returns:
        The configuration for `train`.

    Raises:
        ConfigError: `overrides` is a string, not a list; the directory has no such root; the configuration can't be
            composed; or an own module would be trained on an example's data.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"compose: overrides must be a list; got {overrides!r}. Use compose([{overrides!r}]).")
    source = Source(None if config_dir is None else str(Path(config_dir).absolute()), config_name)
    if config_dir is not None and not Path(config_dir, f"{config_name}.yaml").is_file():
        raise ConfigError(
            f"compose: {config_dir} has no {config_name}.yaml. Give the root configuration's name in config_name and "
            "its directory in config_dir."
        )
    try:
        cfg = source.compose(source.named(overrides), return_hydra=True)
    except Exception as exc:
        if sentence := composition_sentence(exc, source, overrides):
            raise ConfigError(sentence) from exc
        raise
    if not OmegaConf.is_missing(cfg.module, "_target_"):
        verify_own_data(cfg.hydra.runtime.choices, overrides)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg
