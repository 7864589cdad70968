"""Choose the parts of a module whose parameters are gathered together, and have ranks gather them in one order."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.errors import ConfigError, verify_submodules
from ..core.options import Count

Shard = Literal["auto"] | Sequence[str]
"""Which parts of a module are gathered one by one: chosen by the strategy, or names of submodules."""


@dataclass(frozen=True)
class ShardOptions:
    """How a module is cut over the ranks; see `FSDPStrategy`."""

    shard: Shard = "auto"
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    replicas: Count = 1


SMALLEST = 0.01
"""Fraction of a module's bytes below which a part is gathered with the root's own parameters."""


def automatic_parts(module: nn.Module, candidates: Sequence[str]) -> list[str]:
    """Choose among the names of disjoint submodules.

    A part stays with the root if it has no forward (`nn.ParameterList`), shares a parameter with another, is a
    BatchNorm layer, or is small.
    """
    total = sum(parameter.nbytes for parameter in module.parameters())
    parts = {name: module.get_submodule(name) for name in candidates}
    inside = tuple(f"{name}." for name in candidates)
    num_owners = Counter(id(p) for part in parts.values() for p in set(part.parameters()))
    named = module.named_parameters(remove_duplicate=False)
    num_owners.update({id(p) for name, p in named if not name.startswith(inside)})
    return [
        name
        for name, part in parts.items()
        if (own := list(part.parameters()))
        and type(part).forward is not nn.Module.forward
        and not isinstance(part, _BatchNorm)
        and all(num_owners[id(p)] == 1 for p in own)
        and sum(p.nbytes for p in own) >= SMALLEST * total
    ]


def named_parts(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Verify the parts that the user has named; returns each before the parts that it is in."""
    verify_submodules("fsdp: shard", names, module)
    for name in names:
        own = {id(p) for p in module.get_submodule(name).parameters()}
        for other, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in own and not other.startswith(f"{name}."):
                raise ConfigError(
                    f"fsdp: shard={list(names)}: {name} shares the parameter {other} with the rest of the module, so "
                    "that it can't be gathered alone. Leave it out; it is gathered for the whole step then."
                )
    return sorted(names, key=lambda name: -name.count("."))


RULE = (
    "All ranks must call the parts of strategy.shard in the same order; set strategy.shard=[], or a list without those "
    "that a rank's samples or random numbers choose."
)


class CallOrder:
    """The order in which this rank has communicated parts.

    A collective does not know of which part it is: ranks that gather different parts of equal shapes would mix these.
    So a rank that is about to call another part than in its last step of the kind meets the others first, who must be
    about to call the same. A step like the last one communicates nothing.

    Args:
        meet: waits for all ranks, which must come with the same name; its arguments are this, a rule for errors, and
            a number of calls that only a rank can have made that won't come.
    """

    def __init__(self, meet: Callable[[str, str, int], None]) -> None:
        self._meet, self.num = meet, 0
        self._kind: Any = None
        self._orders: dict[Any, list[list[str]]] = {}
        """Of each kind of step, the orders that all ranks have had; the last one first."""
        self._expected, self._now = list[str](), list[str]()

    def begin(self, kind: Any) -> None:
        """Begin a step; steps of one kind mostly call the same parts."""
        self.end()
        self._kind = kind
        self._expected = next(iter(self._orders.get(kind, ())), [])

    def end(self) -> None:
        """End a step: the other ranks, too, must have called as much."""
        if len(self._now) < len(self._expected):
            self._meet("the end of a step", RULE, self.num + 1)
        others = [order for order in self._orders.get(self._kind, ()) if order != self._now]
        self._orders[self._kind] = [self._now, *others[:7]]
        self._expected, self._now = [], []

    def verify(self, call: str) -> None:
        """Have all ranks make this call; the first time that it comes here they meet."""
        self._now.append(call)
        here = len(self._now)
        if self._expected[here - 1 : here] != [call]:
            self._meet(call, RULE, self.num + 1)
            known = self._orders.get(self._kind, ())
            self._expected = next((order for order in known if order[:here] == self._now), [])
        self.num += 1


class InOrder:
    """A collective of a part, as torch's `set_custom_all_gather` and `set_custom_reduce_scatter` take it."""

    def __init__(self, collective: Callable[..., Any], verify: Callable[[], None]) -> None:
        self._collective, self._verify = collective, verify

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is communicated."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        """Communicate."""
        self._verify()
        return self._collective(output_tensor, input_tensor, **options)
