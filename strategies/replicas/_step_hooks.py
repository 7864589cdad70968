"""Have the hooks that a step registers on each replica belong together, and those on parameters be the root's alone."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..core.errors import ConfigError
from ..core.patching import HOOKS, hooks_of, take_hooks
from ..core.private import of_torch
from ._module_copy import ModuleCopy


class StepHooks:
    """The hooks of one step, from construction on.

    Args:
        modules: of the root.
        parameters: names and parameters of the root.
        copies: the replicas that run, in order, but for the root.
        with_root: whether the root runs.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parameters: Sequence[tuple[str, Tensor]],
        copies: Sequence[ModuleCopy],
        with_root: bool,
    ) -> None:
        self.first = RemovableHandle.next_id
        """The lowest number that they can have."""
        self._modules, self._parameters = modules, parameters
        self._copies = copies
        self._with_root = with_root

    @property
    def are_registered(self) -> bool:
        """Whether the step has registered any, which it may have removed."""
        return RemovableHandle.next_id > self.first

    def verify(self) -> None:
        """Refuse a step that has registered hooks on some replicas only: a part of the batch would miss them."""
        for module in self._modules:
            replicas = [module] * self._with_root + [copy.counterpart(module) for copy in self._copies]
            for key in HOOKS:
                _verify_same(type(module).__name__, [len(replica.__dict__[key]) for replica in replicas])

    def take(self) -> list[tuple[Tensor, Tensor, list[dict[int, Any]]]]:
        """Take those of parameters from the replicas.

        Returns:
            For each parameter of the first copy that had any: that of the root, that of the copy, and the hooks.
        """
        found: list[tuple[Tensor, Tensor, list[dict[int, Any]]]] = []
        for name, parameter in self._parameters:
            own = [copy.counterpart(parameter) for copy in self._copies]
            if not any(of_torch.backward_hooks(p) or of_torch.post_accumulate_grad_hooks(p) for p in own):
                continue
            taken = [take_hooks(p, self.first) for p in own]
            nums = [sum(map(len, hooks)) for hooks in taken]
            if self._with_root:
                nums.insert(0, sum(number >= self.first for hooks in hooks_of(parameter) for number in hooks))
            # the root's see the gradients of all replicas, so that others may have none
            _verify_same(f"parameter {name}", [nums[0], *(num for num in nums if num > nums[0])])
            if any(taken[0]):
                found.append((parameter, own[0], taken[0]))
        return found

    def pair(self) -> None:
        """Note which hooks of the copies belong to those that are registered on the root."""
        for module in self._modules:
            for key in HOOKS:
                added = [number for number in module.__dict__[key] if number >= self.first]
                for copy in self._copies[not self._with_root :] if added else ():
                    copy.pair_hooks(module, key, added, self.first)


def _verify_same(name: str, nums: Sequence[int]) -> None:
    other = next((num for num in nums if num != nums[0]), None)
    if other is not None:
        raise ConfigError(
            f"After a step that registered hooks a {name} has {nums[0]} on one replica and {other} on another: "
            "replicas share the lists and dictionaries that a module had before. Keep each handle in an attribute "
            "of its own, or register hooks in __init__, setup or on_fit_start."
        )
