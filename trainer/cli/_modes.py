"""Run `mode=compare` and `mode=plan`, and print their results."""

from omegaconf import DictConfig

from ...strategies import ConfigError
from ..compare.compare import compare_strategies
from ..compare.table import show_comparison
from ..job import tables
from ..launch import cluster
from ..plan.plan import is_measured, measure, plan_memory
from ..plan.table import measured_lines, show_plan


def run_advisory_mode(cfg: DictConfig) -> None:
    """Run `mode=compare` or `mode=plan` of a resolved configuration (`prepare`)."""
    if cluster.detect() is not None:
        raise ConfigError(f"mode={cfg.mode} must run in a single process. Start it without torchrun or srun.")
    if (cfg.get("data") or {}).get("batch_size") == "auto":
        raise ConfigError(
            f"data.batch_size must be a number with mode={cfg.mode}; got data.batch_size=auto. Set data.batch_size."
        )
    if cfg.mode == "compare":
        show_comparison(compare_strategies(cfg), cfg.run_dir)
        return
    measured = is_measured(cfg)
    planned = plan_memory(cfg)
    show_plan(planned)
    if measured:
        tables.show(None, measured_lines(planned, measure(cfg, planned.strategy)))
