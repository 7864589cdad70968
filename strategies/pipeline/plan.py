"""Cut a module into stages: find the parts of it that can be placed apart, and assign them to devices."""

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn

from ..core.errors import ConfigError, verify_submodules
from ..core.module_checks import verify_shapes, verify_unscripted

Plan: TypeAlias = dict[str, int]
"""The stage of each part, by its name, in order of registration."""


class Part(NamedTuple):
    """The unit of placement: a submodule, or the tensors that an opened module holds itself (`loose`).

    Loose tensors go with the next part; so does one that `begins`, before the layers of a module of the user's.
    """

    name: str
    tensors: tuple[Tensor, ...]
    loose: bool
    begins: bool = False


def find_parts(module: nn.Module, names: Sequence[str] = ()) -> list[Part]:
    """List the parts of a module that can be placed apart; those in `names` are parts, or whole ones."""
    verify_shapes(module)
    verify_unscripted(module)
    ancestors = {name.rsplit(".", depth)[0] for name in names for depth in range(1, name.count(".") + 1)}
    return list(_walk(module, "", ancestors))


def _walk(module: nn.Module, name: str, opened: set[str], begins: bool = False) -> Iterator[Part]:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    if own:
        yield Part(name, own, loose=True)
    holders = {key: child for key, child in module.named_children() if tensors_of(child)}
    for key, child in holders.items():
        path = f"{name}.{key}" if name else key
        begins = begins and not isinstance(child, nn.ModuleList)
        opens = _opens(child, alone=len(holders) == 1)
        if path in opened or opens:
            has_layers = any(isinstance(part, nn.ModuleList) for part in child.children())
            yield from _walk(child, path, opened, begins=has_layers and not opens)
        else:
            yield Part(path, tensors_of(child), loose=False, begins=begins)


def tensors_of(module: nn.Module) -> tuple[Tensor, ...]:
    """The parameters and buffers of a module."""
    return (*module.parameters(), *module.buffers())


def _opens(module: nn.Module, *, alone: bool) -> bool:
    holders = [child for child in module.children() if tensors_of(child)]
    # a subclass with its own forward may do anything between its children, such as add a residual
    if not holders or type(module).forward in (nn.Sequential.forward, nn.Module.forward):
        return bool(holders)
    foreign = type(module).__module__.split(".")[0] != "torch"
    return alone and (foreign or any(isinstance(child, (nn.Sequential, nn.ModuleList)) for child in holders))


def balanced_cut(costs: Sequence[float], weights: Sequence[float]) -> list[int]:
    """Cut costs into contiguous stages of these capacities, the fullest as empty as possible; returns their sizes."""
    before = [0, *accumulate(costs)]
    best: dict[int, tuple[float, list[int]]] = {len(costs): (0.0, [])}
    """The load of the fullest stage, and the sizes, by where the first of the stages at the end begins."""
    for num_later, weight in enumerate(reversed(weights)):
        best = {
            start: min(
                (
                    (max((before[end] - before[start]) / weight, load), [end - start, *sizes])
                    for end, (load, sizes) in best.items()
                    if end > start
                ),
                key=lambda option: (option[0], -option[1][0]),
            )
            for start in range(len(costs) - num_later)
        }
    return best[0][1]


def auto_plan(
    module: nn.Module, num_stages: int, optimizer_copies: float = 2, weights: Sequence[float] | None = None
) -> Plan:
    """Balance the memory of contiguous stages; see `StageOptions`."""
    parts = find_parts(module)
    if len(_groups(parts, dict.fromkeys((part.name for part in parts), 1.0))) < num_stages:
        # layers within modules of transformers, all tied by their embedding: open these, too
        lists = [name for name, part in module.named_modules() if isinstance(part, nn.ModuleList) and len(part) > 1]
        outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
        parts = find_parts(module, [f"{name}.0" for name in outer if tensors_of(module.get_submodule(name))])
    bytes_of = {  # of weights and buffers, gradients and optimizer state
        part.name: sum(round(t.nbytes * (2 + optimizer_copies if t.requires_grad else 1)) for t in part.tensors)
        for part in parts
    }
    return balanced_plan(module, bytes_of, weights or [1.0] * num_stages)


def balanced_plan(module: nn.Module, cost_of: Mapping[str, float], weights: Sequence[float]) -> Plan:
    """Balance any cost of the parts over contiguous stages; parts without any stay with the previous one."""
    parts = find_parts(module, list(cost_of))
    groups = _groups(parts, cost_of)
    if len(groups) < len(weights):
        raise ConfigError(
            f"{len(weights)} stages were requested, but {type(module).__name__} has {len(groups)} parts to place: "
            f"{', '.join('+'.join(group) for group in groups) or 'none'}. Give at most {len(groups)} devices, or name "
            "smaller parts: partition=[first module of each later stage]."
        )
    sizes = balanced_cut([sum(cost_of[name] for name in group) for group in groups], weights)
    stages = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    stage_of = {name: stage for group, stage in zip(groups, stages, strict=True) for name in group}
    return {part.name: stage_of[part.name] for part in parts}


def _groups(parts: Sequence[Part], cost_of: Mapping[str, float]) -> list[list[str]]:
    """Group inseparable parts: tied ones, loose tensors with the next part, parts without cost with the previous."""
    groups: list[list[str]] = []
    group_of: dict[int, int] = {}
    pending: list[Part] = []
    for part in parts:
        pending.append(part)
        if (part.loose or (part.begins and id(part.tensors[0]) not in group_of)) and part is not parts[-1]:
            continue
        tensors = [id(tensor) for one in pending for tensor in one.tensors]
        is_free = groups and not any(cost_of[one.name] for one in pending)
        homes = [group_of[tensor] for tensor in tensors if tensor in group_of]
        home = min(homes, default=len(groups) - 1 if is_free else len(groups))
        if home == len(groups):
            groups.append([])
        groups[home] += [one.name for one in pending]
        group_of.update(dict.fromkeys(tensors, home))
        pending = []
    return groups


def named_plan(module: nn.Module, num_stages: int, first_modules: Sequence[str]) -> Plan:
    """Start each later stage at a module that the user names; tied parts go to the first one's stage."""
    verify_submodules("partition", first_modules, module)
    place = {name: i for i, (name, _) in enumerate(module.named_modules())}
    begins = [place[name] for name in first_modules]
    if len(begins) != num_stages - 1 or begins != sorted(begins):
        raise ConfigError(
            f"partition={list(first_modules)} has {len(begins)} names for {num_stages} stages. Give {num_stages - 1}: "
            "the first module of each stage after stage 0, in the order of module.named_modules()."
        )
    plan: Plan = {}
    home: dict[int, int] = {}
    for part in find_parts(module, first_modules):
        stages = [bisect(begins, place[part.name]), *(home[id(one)] for one in part.tensors if id(one) in home)]
        plan[part.name] = min(stages)
        home.update({id(tensor): plan[part.name] for tensor in part.tensors})
    if empty := {*range(num_stages)} - {*plan.values()}:
        raise ConfigError(
            f"partition={list(first_modules)} leaves stage {min(empty)} without parameters. "
            "Name modules so that every stage holds at least one module with parameters."
        )
    return plan
