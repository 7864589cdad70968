"""Refuse parts of a module that ranks call differently, one more often than another.

Each call gathers the part from all ranks. If they gather different parts, gloo ends a process by SIGABRT, or all wait.
"""

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from .refusals import refuse_other_calls

_WATCHED_STEPS = 8
"""Steps of each kind whose calls are compared: what a step decides at random mostly differs in one of them."""
_END = -1


class PartCalls:
    """Compares call by call, in a run's first steps of each kind, which parts the ranks call.

    Args:
        module: the module, cut over the ranks.
        group: the ranks that it is cut over.
        device: of the messages to other ranks.
        gather: gathers a tensor of shape (1,) from all ranks of a group, as one of shape (ranks, 1).
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        device: torch.device,
        gather: Callable[[Tensor, dist.ProcessGroup], Tensor],
    ) -> None:
        parts = [named for named in module.named_modules() if named[0] and isinstance(named[1], FSDPModule)]
        self._parts, self._names = [part for _, part in parts], [*(name for name, _ in parts), "the end of the step"]
        self._device, self._group, self._gather = device, group, gather
        self._num_steps = Counter[str]()
        self._watched = ""
        self._in_step = False
        self._handles: list[RemovableHandle] = []

    @contextmanager
    def step(self, name: str) -> Generator[None]:
        """Watch a step inside the block; every rank must call it.

        Args:
            name: of the step (`training_step`).

        Raises:
            ConfigError: ranks call different parts; the message names them.
        """
        if name != self._watched:
            self._watch(name)
        if not self._handles:
            yield
            return
        self._in_step = True
        try:
            yield
            self._compare(_END)
        finally:
            self._in_step = False
        self._num_steps[name] += 1
        if self._num_steps[name] == _WATCHED_STEPS:
            self.close()

    def _watch(self, name: str) -> None:
        """Have the parts called by steps of another kind compared, unless enough have been."""
        self.close()
        self._watched = name
        if self._num_steps[name] < _WATCHED_STEPS:
            compare: Any = torch.compiler.disable(self._compare)
            self._handles = [
                part.register_forward_pre_hook(partial(compare, i), prepend=True) for i, part in enumerate(self._parts)
            ]

    def _compare(self, number: int, *_: Any) -> None:
        if self._in_step:
            numbers = self._gather(torch.tensor([number], device=self._device), self._group).flatten().tolist()
            if len(set(numbers)) > 1:
                ranks = dist.get_process_group_ranks(self._group)
                calls = {rank: self._names[one] for rank, one in zip(ranks, numbers, strict=True)}
                refuse_other_calls(self._watched, calls)

    def close(self) -> None:
        """Watch no more."""
        while self._handles:
            self._handles.pop().remove()
