"""Find out whether a module's step keeps something on the module, which micro-batches in threads would share.

Micro-batches in threads call the same module in turns that change at every stage. What a step keeps there from one
layer to the next (features that a forward hook collects, a loss that `forward` appends to a list, hooks that the step
itself registers) would then be mixed. Such micro-batches run one after the other.
"""

from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from pytorch_lightning import LightningModule
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric, MetricCollection

_HOOKS = tuple(key for key in nn.Module().__dict__ if "_hooks" in key and "state_dict" not in key)
_LIGHTNING = LightningModule().__dict__.keys()


class KeptState:
    """Watches the first micro-batch of a run, and decides whether micro-batches may run at the same time.

    Args:
        module: the module; torchmetrics' metrics in it are left out.
        own_hooks: numbers of hooks that the strategy has registered.
    """

    def __init__(self, module: nn.Module, own_hooks: Collection[int]) -> None:
        self._modules = [part for part in module.modules() if not isinstance(part, (Metric, MetricCollection))]
        self._own_hooks = set(own_hooks)
        self._num_hooks = -1
        self._keeps_state = False

    def must_watch(self) -> bool:
        """Whether nothing is known yet, or hooks were registered since the last look."""
        return not self._keeps_state and RemovableHandle.next_id != self._num_hooks

    @property
    def keeps_state(self) -> bool:
        """Whether micro-batches must run one after the other, as far as is known."""
        return self._keeps_state

    def watch(self, call: Callable[[], Any]) -> Any:
        """Run a micro-batch's step alone, and decide by what it does."""
        before = [dict(part.__dict__) for part in self._modules]
        collections = [value for values in before for key, value in values.items() if _is_collection(key, value)]
        lengths = list(map(len, collections))
        grown: list[bool] = []
        look = register_module_forward_hook(lambda *_: grown.append(lengths != list(map(len, collections))))
        num_hooks = RemovableHandle.next_id
        try:
            output = call()
        finally:
            look.remove()
        self._num_hooks = RemovableHandle.next_id
        changed = any(_differ(old, part.__dict__) for old, part in zip(before, self._modules, strict=True))
        self._keeps_state = changed or any(grown) or self._num_hooks != num_hooks or self._has_hooks()
        return output

    def _has_hooks(self) -> bool:
        hooks = (number for part in self._modules for key in _HOOKS for number in part.__dict__.get(key, ()))
        return not self._own_hooks.issuperset(hooks)


def _is_collection(key: str, value: Any) -> bool:
    return key not in _LIGHTNING and isinstance(value, (list, dict, set, deque))


def _differ(before: dict[str, Any], now: dict[str, Any]) -> bool:
    keys = (before.keys() | now.keys()) - _LIGHTNING
    return any(key not in before or key not in now or before[key] is not now[key] for key in keys)
