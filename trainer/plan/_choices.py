"""List ways to train the same global batch on the same devices, from cheap to expensive, for `mode=plan`."""

from collections.abc import Iterator

from omegaconf import DictConfig, open_dict

from ...strategies.core.options import as_given
from ...strategies.pipeline.schedule import num_ticks
from ..config.group_files import PACKAGE
from ._search import Tried
from ._topology import Topology

RECOMPUTE_TIME = {"never": 1.0, "except_last": 1.3, "always": 4 / 3}
"""Computing of a step in multiples of that without recomputing: a further forward pass, half as long as a backward."""


MICROBATCHES = 4
"""Micro-batches per stage: more of them fill the stages better and are smaller, but each costs launches."""


def choices(cfg: DictConfig, given: Topology, batch: int) -> list[tuple[Tried, DictConfig]]:
    """List the ways to train, from cheap to expensive, before they are tried; the configured one is left out.

    Returns:
        Each with its strategy's configuration.
    """
    found: list[tuple[Tried, DictConfig]] = []
    for options, loader_batch, computing, traffic in _spreads(given, batch, int(cfg.num_nodes)):
        for recompute, more in RECOMPUTE_TIME.items():
            strategy = _strategy(cfg, given.name, options)
            if "recompute" not in strategy or (not options and recompute == strategy.recompute):
                continue
            with open_dict(strategy):
                strategy.recompute = recompute
            names = {key: key if key == "strategy" else f"strategy.{key}" for key in options}
            shown = tuple(f"{names[key]}={as_given(value)}" for key, value in options.items())
            chosen = shown if options and recompute == "never" else (*shown, f"strategy.recompute={recompute}")
            found.append((Tried(chosen, loader_batch, computing * more, traffic), strategy))
    return sorted(found, key=lambda choice: (round(choice[0].computing, 3), choice[0].traffic))


Spread = tuple[dict[str, object], int, float, float]
"""Options of a strategy, the loader's batch, computing and traffic."""


def _spreads(given: Topology, batch: int, num_nodes: int) -> Iterator[Spread]:
    """Ways to spread the work, without recomputing."""
    devices, everywhere = given.num_devices, given.global_batch(batch)
    many = devices * num_nodes
    per_rank = given.is_per_rank and given.num_ranks > 1
    traffic = 0.0 if many == 1 else 2.0 * (devices - 1) if given.is_replicated else 3.0 if given.num_shards > 1 else 2.0
    computing = num_ticks(given.num_microbatches, given.num_stages) / given.num_microbatches
    yield {}, batch, computing, traffic
    if many == 1:
        return
    if (given.num_ranks > 1 or given.is_replicated) and given.num_owners == 1 and given.num_shards == 1:
        yield {"shard_optimizer": True}, batch, computing, traffic + 1.0
    if given.num_shards == 1:
        size_is = "per_device" if per_rank and given.num_stages == 1 else "global"
        yield {"strategy": "fsdp", "batch_size_is": size_is}, batch if size_is == "per_device" else everywhere, 1.0, 3.0
    for size in (size for size in range(2, devices + 1) if devices % size == 0 and everywhere >= size):
        num = max(1, min(MICROBATCHES * size, everywhere * size // many))
        computing = num_ticks(num, size) / num
        if size == devices and num_nodes == 1:
            yield {"strategy": "model_parallel", "num_microbatches": num}, everywhere, computing, 0.0
        else:
            options = {"strategy": "ddp_model_parallel", "model_parallel_size": size, "num_microbatches": num}
            yield {**options, "batch_size_is": "global"}, everywhere, computing, 2.0 / size


def _strategy(cfg: DictConfig, given: str, options: dict[str, object]) -> DictConfig:
    """The configuration of a strategy, with the user's other options where it is the configured one."""
    name = str(options.get("strategy", given))
    strategy = cfg.strategy.copy() if name == given else PACKAGE.options("strategy", name)
    with open_dict(strategy):
        strategy.update({key: value for key, value in options.items() if key != "strategy"})
    return strategy
