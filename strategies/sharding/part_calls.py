"""Refuse parts of a module that ranks call differently, one more often than another.

Each call gathers the part from all ranks. If they gather different parts, gloo ends a process by SIGABRT, or all wait.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .refusals import refuse_other_calls

_WATCHED_STEPS = 8
"""Training steps whose calls are compared: what a step decides at random mostly differs in one of them."""
_END = -1


class PartCalls:
    """Compares call by call, in a run's first training steps, which parts the ranks call.

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
        self._names, self._device = [*(name for name, _ in parts), "the end of the step"], device
        self._group, self._gather, self._num_steps, self._in_step = group, gather, 0, False
        compare: Any = torch.compiler.disable(self._compare)
        self._handles = [
            part.register_forward_pre_hook(partial(compare, i), prepend=True) for i, (_, part) in enumerate(parts)
        ]

    @contextmanager
    def step(self) -> Generator[None]:
        """Watch a training step inside the block; every rank must call it.

        Raises:
            ConfigError: ranks call different parts; the message names them.
        """
        if not self._handles:
            yield
            return
        self._in_step = True
        try:
            yield
            self._compare(_END)
        finally:
            self._in_step = False
        self._num_steps += 1
        if self._num_steps == _WATCHED_STEPS:
            self.close()

    def _compare(self, number: int, *_: Any) -> None:
        if self._in_step:
            numbers = self._gather(torch.tensor([number], device=self._device), self._group).flatten().tolist()
            if len(set(numbers)) > 1:
                ranks = dist.get_process_group_ranks(self._group)
                refuse_other_calls({rank: self._names[one] for rank, one in zip(ranks, numbers, strict=True)})

    def close(self) -> None:
        """Watch no more."""
        while self._handles:
            self._handles.pop().remove()
