"""Run the jobs of a command: this process's own, or those that rank 0 publishes under a launcher."""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.plugins.environments import ClusterEnvironment, TorchElasticEnvironment

from ...strategies import ConfigError
from ...strategies.distributed.process_exit import die_with_parent
from ..job import tables
from ..job.result import DIVERGED
from ..job.run import Run
from ..job.summary import show_summary
from ..launch import cluster
from .main import in_sweep
from .train import ADVISORY_MODES, check, default_run_dir, inside_hydra, prepare, train


def run_under(started_by: ClusterEnvironment, run_hydra: Callable[[], None]) -> None:
    """Run the command in a rank of a launcher: Hydra on rank 0, and the jobs that it publishes on every other."""
    if isinstance(started_by, TorchElasticEnvironment):
        die_with_parent()  # torch's agent leaves its workers behind when it is killed
    if started_by.global_rank() > 0:
        return follow(started_by)
    try:
        sys.argv[1:] = cluster.resolved_words(sys.argv[1:], started_by)
        if run_dir := cluster.earlier_run_dir(started_by):
            sys.argv.append(f"hydra.run.dir={run_dir}")
        run_hydra()
    finally:
        with suppress(ConfigError):  # of the launcher, refused already
            cluster.publish(started_by, None)


def follow(started_by: ClusterEnvironment) -> None:
    """Run the jobs that rank 0 publishes; called on every other rank."""
    try:
        while (cfg := cluster.receive(started_by)) is not None:
            Run(cfg, started_by.global_rank(), started_by.world_size()).execute()
    finally:
        cluster.leave(started_by)


def check_job(cfg: DictConfig) -> None:
    """Check a configuration without running it, and say that it is valid."""
    checked = check(cfg)
    named = [f"{key}={checked[key].get('_target_')}" for key in ("module", "data", "strategy") if checked.get(key)]
    sys.stdout.write(f"The configuration is valid: {', '.join(named)}, devices={checked.devices}.\n")


def run_job(cfg: DictConfig) -> float | None:
    """Run one job, print its summary table, and return the monitored metric, which Hydra's sweepers optimize.

    Raises:
        SystemExit: the weights contain nan. In a sweep the other jobs go on.
    """
    if cfg.mode in ADVISORY_MODES:
        advise(prepare(cfg))
        return None
    if cfg.get("hparams_search"):
        from ..study.search import Search

        verify_alone("hparams_search")
        home = cfg.run_dir if inside_hydra(cfg) else default_run_dir(cfg)
        return Search(cfg, Path(home).absolute()).execute(train)
    if OmegaConf.select(cfg, "extras.print_config"):
        sys.stdout.write(OmegaConf.to_yaml(cfg, resolve=True))
    result = train(cfg)
    show_summary(result, cfg.log_dir)
    if result.status == DIVERGED and not in_sweep():
        sys.exit(
            "Error: Training diverged: the weights contain nan. Lower the learning rate or set "
            "trainer.gradient_clip_val; trainer.detect_nonfinite=raise stops at the first such step."
        )
    return result.monitored


def advise(cfg: DictConfig) -> None:
    """Run `mode=compare` or `mode=plan` of a resolved configuration (`prepare`), and print the result."""
    verify_alone(f"mode={cfg.mode}")
    if (cfg.get("data") or {}).get("batch_size") == "auto":
        raise ConfigError(
            f"data.batch_size must be a number with mode={cfg.mode}; got data.batch_size=auto. Set data.batch_size."
        )
    if cfg.mode == "compare":
        from ..study.compare import compare_strategies, show_comparison

        show_comparison(compare_strategies(cfg), cfg.run_dir)
    else:
        from ..plan.plan import is_measured, measure, plan_memory
        from ..plan.table import measured_lines, show_plan

        measured, planned = is_measured(cfg), plan_memory(cfg)
        show_plan(planned)
        if measured:
            tables.show(None, measured_lines(planned, measure(cfg, planned.strategy)))


def verify_alone(asked: str) -> None:
    """Refuse what starts processes of its own under a launcher.

    Raises:
        ConfigError: a launcher has started this process.
    """
    if cluster.detect() is not None:
        raise ConfigError(f"{asked} must run in a single process. Start it without torchrun or srun.")
