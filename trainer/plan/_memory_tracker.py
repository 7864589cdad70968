"""Count the bytes of tensors on each device at every operation. With fake tensors nothing is allocated."""

import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

LITERAL = "aten::lift_fresh"
"""The operation behind `torch.tensor(1.0)`: optimizers count steps with such scalars, which stay on the CPU."""


class MemoryTracker(TorchDispatchMode):
    """Tracks the lifetime of every storage that operations create while the mode is active.

    Args:
        block_bytes: sizes are rounded up to multiples of this, like in the device's allocator (CUDA: 512).

    Attributes:
        live: current bytes by device.
        peak: largest `live` since `start_peak`.
    """

    def __init__(self, block_bytes: int = 1) -> None:
        super().__init__()
        self.live = Counter[torch.device]()
        self.peak = Counter[torch.device]()
        self._block_bytes = block_bytes
        self._known: dict[int, tuple[torch.device, int, weakref.ref[Any]]] = {}

    def track(self, tensor: Tensor) -> None:
        """Count a tensor's storage, if it is not counted yet, until it is freed."""
        if (key := key_of(tensor)) in self._known:
            return
        device, size = tensor.device, self.size_of(tensor)
        freed = weakref.ref(tensor.untyped_storage(), lambda _: self._release(key))
        self._known[key] = (device, size, freed)
        self.live[device] += size
        self.peak[device] = max(self.peak[device], self.live[device])

    def _release(self, key: int) -> None:
        device, size, _ = self._known.pop(key)
        self.live[device] -= size

    def forget(self, tensor: Tensor) -> None:
        """Count a tensor's storage no longer."""
        if self.counts(tensor):
            self._release(key_of(tensor))

    def counts(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage is counted."""
        return key_of(tensor) in self._known

    def size_of(self, tensor: Tensor) -> int:
        """Bytes of a tensor's storage, in whole blocks."""
        return -(-tensor.untyped_storage().nbytes() // self._block_bytes) * self._block_bytes

    def start_peak(self) -> None:
        """Reset the peak."""
        self.peak = self.live.copy()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name().startswith(LITERAL) and isinstance(result, Tensor) and not result.dim():
            return result
        given = {key_of(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and key_of(value) not in given:  # else modified in place, or a view
                self.track(value)
        return result


def key_of(tensor: Tensor) -> int:
    """What tensors that share a storage have in common."""
    return tensor.untyped_storage()._cdata
