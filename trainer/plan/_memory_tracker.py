"""Count the bytes of tensors per stage at every operation. With fake tensors nothing is allocated."""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from ...strategies.core.patching import replaced

LITERAL = "aten::lift_fresh"
"""The operation behind `torch.tensor(1.0)`: optimizers count steps with such scalars, which stay on the CPU."""


class MemoryTracker(TorchDispatchMode):
    """Tracks the lifetime of every storage that operations create while the mode is active.

    A result belongs to the stage of its inputs, as on real devices; `copied` moves a tensor to another stage.

    Args:
        block_bytes: sizes are rounded up to multiples of this, like in the device's allocator (CUDA: 512).

    Attributes:
        live: current bytes per stage.
        peak: largest `live` per stage since `start_peak`.
        home: the stage for results of operations without tensor inputs.
        moving_to: the stage for all results while a tensor moves between stages.
    """

    def __init__(self, num_stages: int = 1, block_bytes: int = 1) -> None:
        super().__init__()
        self.live = [0] * num_stages
        self.peak = [0] * num_stages
        self.home = 0
        self.moving_to: int | None = None
        self._block_bytes = block_bytes
        self._known: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def track(self, tensor: Tensor, stage: int) -> None:
        """Count a tensor's storage, if it is not counted yet, until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = self.size_of(tensor)
        self.live[stage] += size
        self.peak[stage] = max(self.peak[stage], self.live[stage])

        def forget(_: Any) -> None:
            self.live[stage] -= size
            del self._known[key]

        self._known[key] = (stage, weakref.ref(storage, forget))

    def forget(self, tensor: Tensor) -> None:
        """Count a tensor's storage no longer."""
        known = self._known.pop(tensor.untyped_storage()._cdata, None)
        if known is not None:
            self.live[known[0]] -= self.size_of(tensor)

    def size_of(self, tensor: Tensor) -> int:
        """Bytes of a tensor's storage, in whole blocks."""
        return -(-tensor.untyped_storage().nbytes() // self._block_bytes) * self._block_bytes

    def stage_of(self, tensor: Tensor) -> int | None:
        """The stage that a tensor's storage is counted for; None if it is not counted."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[0]

    def copied(self, tensor: Tensor, stage: int) -> Tensor:
        """A copy of a tensor on another stage; its gradient is copied back."""
        back = self.stage_of(tensor)
        with replaced(self, "moving_to", stage):
            copy = tensor.clone()
        if copy.requires_grad:
            copy.register_hook(partial(self.copied, stage=self.home if back is None else back))
        return copy

    def start_peak(self) -> None:
        """Reset the peak."""
        self.peak = list(self.live)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name().startswith(LITERAL) and isinstance(result, Tensor) and not result.dim():
            return result
        given = args[0] if args else None
        if isinstance(result, (list, tuple)) and isinstance(given, (list, tuple)) and len(result) == len(given):
            for made, tensor in zip(result, given, strict=True):  # a `_foreach` operation: one result per tensor
                self._track_results(made, tensor)
        else:
            self._track_results(result, (args, kwargs))
        return result

    def _track_results(self, results: Any, given: Any) -> None:
        inputs = [value for value in tree_leaves(given) if isinstance(value, Tensor)]
        known = {tensor.untyped_storage()._cdata for tensor in inputs}  # modified in place, or views
        made = [value for value in tree_leaves(results) if isinstance(value, Tensor)]
        made = [tensor for tensor in made if tensor.untyped_storage()._cdata not in known]
        if made:
            stage = self._place(inputs) if self.moving_to is None else self.moving_to
            for tensor in made:
                self.track(tensor, stage)

    def _place(self, tensors: Sequence[Tensor]) -> int:
        stages = ((tensor.dim(), self.stage_of(tensor)) for tensor in tensors)
        # scalars may be on any device: the other inputs decide
        known = sorted(((not dim, stage) for dim, stage in stages if stage is not None), key=lambda item: item[0])
        return known[0][1] if known else self.home
