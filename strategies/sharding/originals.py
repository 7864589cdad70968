"""Follow the parameters of a module through being cut, which puts others in their place.

An optimizer made before goes on with the shards. Whatever else holds a parameter from before would read values that
nobody trains, without a word.
"""

import gc
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from ..core.errors import ConfigError
from .whole import shard_entry

_DEPTH = 3
"""Containers within containers that are looked through."""

_OWN = {"_parameters", "_buffers", "_modules"}
"""Attributes in which a module holds its parts, which were replaced."""


class Originals:
    """The parameters of a module before it is cut."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = [(name, weakref.ref(p)) for name, p in module.named_parameters()]

    def _replaced(self) -> dict[int, tuple[str, nn.Parameter]]:
        """Those that somebody still holds, by id: their names, and what stands in their place."""
        now = dict(self._module.named_parameters())
        held = [(name, before) for name, ref in self._before if (before := ref()) is not None]
        return {id(before): (name, now[name]) for name, before in held if now.get(name, before) is not before}

    def give_shards(self, optimizers: Sequence[Optimizer]) -> None:
        """Have optimizers train the shards of the parameters that they were made with."""
        replaced = self._replaced()
        for optimizer in optimizers if replaced else ():
            for group in optimizer.param_groups:
                before: list[Any] = group["params"]
                group["params"] = [replaced[id(p)][1] if id(p) in replaced else p for p in before]
                for old, new in zip(before, group["params"], strict=True):
                    if new is not old and old in optimizer.state:
                        optimizer.state[new] = shard_entry(optimizer.state.pop(old), new)

    def verify_unheld(self, owners: Iterable[object]) -> None:
        """Refuse objects that hold a parameter from before.

        Args:
            owners: the module and what runs beside it.

        Raises:
            ConfigError: an attribute of one of them does; the message names it.
        """
        if not self._replaced():
            return
        gc.collect()
        replaced = self._replaced()
        parts = [part for owner in owners for part in (owner.modules() if isinstance(owner, nn.Module) else (owner,))]
        for owner in parts if replaced else ():
            for attribute, value in getattr(owner, "__dict__", {}).items():
                found = next((p for p in _tensors_in(value, _DEPTH) if id(p) in replaced), None)
                if found is not None and attribute not in _OWN:
                    kind = type(owner).__name__
                    kind = kind.removeprefix("FSDP") if isinstance(owner, FSDPModule) else kind
                    raise ConfigError(
                        f"fsdp: {kind}.{attribute} holds the parameter {replaced[id(found)][0]} from "
                        "before it was cut over the ranks, which nobody trains. Read parameters from the module where "
                        "they are used (self.parameters(), self.net.weight), or choose strategy=ddp."
                    )


class LateParameters:
    """Refuses parameters that a module is given after it was cut: no rank would gather or reduce them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known = set(map(id, module.parameters()))
        self._may_be_there = False
        register = (register_module_parameter_registration_hook, register_module_module_registration_hook)
        self._handles = [each(self._note) for each in register]

    def _note(self, *_: Any) -> None:
        self._may_be_there = True

    def verify(self) -> None:
        """Look at the module, if anything was registered in any module since the last look; not within a step.

        Raises:
            ConfigError: it has a parameter that was not there when it was cut; the message names it.
        """
        if not self._may_be_there:
            return
        self._may_be_there = False
        late = [name for name, p in self._module.named_parameters() if id(p) not in self._known]
        if late:
            raise ConfigError(
                f"fsdp: {', '.join(late)} was added, or replaced by another parameter, after the module was cut over "
                "the ranks. Do so in __init__ or configure_model, or write to it: parameter.data.copy_(values)."
            )

    def close(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (Mapping, list, tuple, set, deque)):
        for part in list(value.values() if isinstance(value, Mapping) else value):
            yield from _tensors_in(part, depth - 1)
