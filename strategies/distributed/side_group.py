"""Sum small tensors in a separate process group, so that they do not wait for gradients."""

from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work


class SideGroup:
    """Starts sums of small CPU tensors over all ranks, in place.

    Args:
        timeout: limit for each sum.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._group: dist.ProcessGroup | None = cast(
            "dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout)
        )

    def __call__(self, values: Tensor) -> Work:
        """Start summing a tensor."""
        assert self._group is not None, "the run has ended"
        return cast(Work, dist.all_reduce(values, group=self._group, async_op=True))

    def end(self) -> None:
        """End the group and its threads, even if this object is still referenced (by a loader, for example)."""
        dist.destroy_process_group(self._group)
        self._group = None
