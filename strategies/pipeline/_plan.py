"""Cut a module into stages: assign its parts to devices.

```
module                          parts, in order of registration      3 stages
LM( tok: Embedding              tok                                  0
    blocks: ModuleList(4)       blocks.0 … blocks.3                  0 1 1 2
    drop: Dropout               (runs on its input's device)
    head: Linear, tied to tok)  head                                 0: tied weights stay together
```
"""

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, groupby

import torch
from torch import nn

from ..core.errors import ConfigError, verify_submodules
from .module_parts import Part, find_parts, first_layers, part_bytes


@dataclass(frozen=True)
class StagePlan:
    """Assignment of parts to stages."""

    num_stages: int
    stage_of: Mapping[str, int]
    """Stage by part name, in order of registration."""

    @cached_property
    def last_part_stage(self) -> int:
        """The stage of the module's last part; the last one of a module without parts."""
        return [self.num_stages - 1, *self.stage_of.values()][-1]


def balanced_cut(costs: Sequence[float], weights: Sequence[float]) -> list[int]:
    """Cut a sequence of costs into contiguous stages so that the largest stage, by its weight, is as small as possible.

    Args:
        costs: costs, in order; at least as many as stages.
        weights: capacity of each stage: 2 takes as much as two stages of 1.

    Returns:
        Number of items per stage, none of them 0.
    """
    num, num_stages = len(costs), len(weights)
    assert num >= num_stages, "the caller refuses more stages than items"
    before = [0, *accumulate(costs)]

    @cache
    def best(stage: int, start: int) -> tuple[float, list[int]]:
        """The smallest largest load of a stage and those after it, which hold all from `start` on, and their sizes."""
        if stage == num_stages - 1:
            return (before[num] - before[start]) / weights[stage], [num - start]
        options: list[tuple[float, list[int]]] = []
        for end in range(start + 1, num - num_stages + stage + 2):  # each later stage gets one, too
            load, (later, sizes) = (before[end] - before[start]) / weights[stage], best(stage + 1, end)
            options.append((max(load, later), [end - start, *sizes]))
        return min(options, key=lambda option: (option[0], -option[1][0]))

    return best(0, 0)[1]


def auto_plan(
    module: nn.Module,
    num_stages: int,
    optimizer_copies: float = 2,
    weights: Sequence[float] | None = None,
) -> StagePlan:
    """Balance the memory of contiguous stages.

    Args:
        optimizer_copies: tensors of a parameter's size that the optimizer keeps per trainable parameter (Adam 2, SGD
            with momentum 1, plain SGD 0).
        weights: relative memory of the stages' devices; None takes them for equal.

    Returns:
        The contiguous plan with the smallest possible largest stage.
    """
    parts = find_parts(module)
    groups, _ = _groups(parts, dict.fromkeys((part.name for part in parts), 1.0))
    if len(groups) < num_stages:  # modules with layers are opened, too
        parts = find_parts(module, first_layers(module))
    costs = {part.name: part_bytes(part, optimizer_copies) for part in parts}
    return balanced_plan(module, costs, weights or [1.0] * num_stages)


def balanced_plan(module: nn.Module, cost_of: Mapping[str, float], weights: Sequence[float]) -> StagePlan:
    """Balance any cost of the parts over contiguous stages; parts without any stay with the previous one."""
    parts = find_parts(module, list(cost_of))
    groups, costs = _groups(parts, cost_of)
    num_stages = len(weights)
    if len(groups) < num_stages:
        raise ConfigError(
            f"{num_stages} stages were requested, but {type(module).__name__} has {len(groups)} parts to place: "
            f"{', '.join('+'.join(group) for group in groups) or 'none'}. Give at most {len(groups)} devices, or name "
            "smaller parts: partition=[first module of each later stage]."
        )
    sizes = balanced_cut(costs, weights)
    stages = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    stage_of = {name: stage for group, stage in zip(groups, stages, strict=True) for name in group}
    return StagePlan(num_stages, {part.name: stage_of[part.name] for part in parts})


def _groups(parts: Sequence[Part], cost_of: Mapping[str, float]) -> tuple[list[list[str]], list[float]]:
    """Group inseparable parts: tied ones, loose tensors with the next part, parts without cost with the previous."""
    groups: list[list[str]] = []
    group_of: dict[int, int] = {}
    pending: list[Part] = []
    for part in parts:
        pending.append(part)
        if (part.loose or (part.begins and id(part.tensors[0]) not in group_of)) and part is not parts[-1]:
            continue
        tensors = [tensor for p in pending for tensor in p.tensors]
        home = min((group_of[id(tensor)] for tensor in tensors if id(tensor) in group_of), default=None)
        if home is None and groups and not any(cost_of[p.name] for p in pending):
            home = len(groups) - 1
        if home is None:
            home = len(groups)
            groups.append([])
        groups[home] += [p.name for p in pending]
        group_of.update({id(tensor): home for tensor in tensors})
        pending = []
    costs = [sum(cost_of[name] for name in group) for group in groups]
    return groups, costs


def named_plan(module: nn.Module, num_stages: int, first_modules: Sequence[str]) -> StagePlan:
    """Start each later stage at a module that the user names.

    Args:
        first_modules: the first module of stage 1, 2, …, as in `module.named_modules()`.

    Returns:
        The plan; parts that share a tensor with an earlier part go to that part's stage.
    """
    if len(first_modules) != num_stages - 1:
        raise ConfigError(
            f"partition={list(first_modules)} has {len(first_modules)} names for {num_stages} stages. Give "
            f"{num_stages - 1}: the first module of each stage after stage 0."
        )
    verify_submodules("partition", first_modules, module)
    place = {name: i for i, (name, _) in enumerate(module.named_modules())}
    begins = [place[name] for name in first_modules]
    if begins != sorted(begins):
        raise ConfigError(
            f"partition={list(first_modules)} is not in the order of the module. Give the names in the order of "
            "module.named_modules()."
        )
    stage_of: dict[str, int] = {}
    home: dict[int, int] = {}
    for part in find_parts(module, first_modules):
        stages = [bisect(begins, place[part.name]), *(home[id(one)] for one in part.tensors if id(one) in home)]
        stage_of[part.name] = min(stages)
        home.update({id(tensor): stage_of[part.name] for tensor in part.tensors})
    empty = [stage for stage in range(num_stages) if stage not in stage_of.values()]
    if empty:
        raise ConfigError(
            f"partition={list(first_modules)} leaves stage {empty[0]} without parameters. "
            "Name modules so that every stage holds at least one module with parameters."
        )
    return StagePlan(num_stages, stage_of)


def plan_lines(plan: StagePlan, devices: Sequence[torch.device]) -> list[str]:
    """Say which modules each stage holds."""
    stages = [[name for name, where in plan.stage_of.items() if where == stage] for stage in range(plan.num_stages)]
    return [f"{', '.join(_ranges(names))} on {device}" for names, device in zip(stages, devices, strict=True)]


def _ranges(names: Sequence[str]) -> list[str]:
    """Shorten `blocks.0, blocks.1, blocks.2` to `blocks.0-2`; the root's own tensors are shown as `(root)`."""

    def run(item: tuple[int, str]) -> tuple[str, int | None]:
        """The same for names whose numbers follow one another."""
        prefix, _, last = item[1].rpartition(".")
        return (prefix, int(last) - item[0]) if last.isdecimal() else (item[1], None)

    runs = [[name for _, name in group] for _, group in groupby(enumerate(names), run)]
    return [f"{first}-{rest[-1].rpartition('.')[2]}" if rest else first or "(root)" for first, *rest in runs]
