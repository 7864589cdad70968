"""Count, on the CPU, what would make the host wait for an accelerator: reads of values, and numbers copied to a device.

A CPU tensor can be read at no cost, so nothing fails there. These counters see the calls that wait on CUDA:
`item`, `bool` and their kind, operators whose result has a shape that depends on values, `equal`, and
`torch.tensor(number, device=...)`, which copies from pageable memory.
"""

import traceback
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READS = (
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "allclose",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "repeat_interleave.Tensor",
    "bincount",
)

_COPIES_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)
_COPIES_TO_HOST = (Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.new_tensor, Tensor.__array__)


class _Operators(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if name in _READS or name.rpartition(".")[0] in _READS:
            self.found.append(_called(name))
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        copies_number = func in _COPIES_NUMBERS and kwargs.get("device") is not None
        if func in _COPIES_TO_HOST or (copies_number and not isinstance(args[0], Tensor)):
            self.found.append(_called(func.__name__))
        return func(*args, **kwargs)


def _called(name: str) -> str:
    frames = [frame for frame in traceback.extract_stack()[:-2] if "site-packages" not in frame.filename]
    return f"{name} at {' < '.join(f'{frame.filename}:{frame.lineno}' for frame in frames[::-1][:3])}"


class HostReads(pl.Callback):
    """Counts from the start of one training step to the end of another, both included.

    Attributes:
        found: one line per call: its name and the innermost lines outside of libraries.
        last: the step that was counted last; -1 before the end of any.
    """

    def __init__(self, first: int = 5, end: int = 20) -> None:
        self.first, self.end = first, end
        self.found: list[str] = []
        self.last = -1
        self._modes: list[Any] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.first:
            self._modes = [_Functions(self.found), _Operators(self.found)]
            for mode in self._modes:
                mode.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.fit_loop.total_batch_idx
        if self._modes:
            self.last = step
        if step == self.end:
            for mode in self._modes[::-1]:
                mode.__exit__(None, None, None)
            self._modes = []
