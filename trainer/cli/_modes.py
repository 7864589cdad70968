"""What `mode=compare` and `mode=plan` do and print."""

from omegaconf import DictConfig

from ...strategies import ConfigError
from ..compare.compare import compare_strategies
from ..compare.table import show_comparison
from ..launch import cluster
from ..plan.plan import is_measured, measure, plan_memory
from ..plan.table import show_measured, show_plan


def run_advisory_mode(cfg: DictConfig) -> None:
    """Print what `mode=compare` or `mode=plan` asks for.

    Args:
        cfg: the resolved configuration (`prepare`).

    Raises:
        ConfigError: it can't be found out here, or for this configuration.
    """
    if cluster.detect() is not None:
        raise ConfigError(f"mode={cfg.mode} runs once, in one process. Start it without torchrun or srun.")
    if (cfg.get("data") or {}).get("batch_size") == "auto":
        raise ConfigError(f"data.batch_size=auto: mode={cfg.mode} needs a number. Set data.batch_size.")
    {"compare": compare, "plan": plan}[cfg.mode](cfg)


def compare(cfg: DictConfig) -> None:
    """Try the strategies, and print which one to use."""
    show_comparison(compare_strategies(cfg), cfg.run_dir)


def plan(cfg: DictConfig) -> None:
    """Print the memory that each device would need; after that its error, where it can be measured."""
    measured = is_measured(cfg)
    planned = plan_memory(cfg)
    show_plan(planned)
    if measured:
        show_measured(planned, measure(cfg, planned.strategy))
