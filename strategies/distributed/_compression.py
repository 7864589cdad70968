"""Compress gradients in communication hooks of DDP."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.futures import Future

from ..core.errors import ConfigError

Compression: TypeAlias = Literal["fp16", "bf16", "powersgd"]
"""Compression of gradients between ranks."""


def compression_hook(compression: Compression | None) -> Callable[[], tuple[Any, Any]] | None:
    """Choose the communication hook of a compression.

    Returns:
        A function that returns the hook's state and the hook; None without compression.

    Raises:
        ConfigError: the compression is unknown.
    """
    if compression is None:
        return None
    if compression not in get_args(Compression):
        raise ConfigError(f"ddp: compression={compression} is unknown; choose one of fp16, bf16, powersgd, null.")
    if compression == "powersgd":
        return lambda: (powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    dtype = torch.float16 if compression == "fp16" else torch.bfloat16
    return lambda: (dtype, reduce_as)


def reduce_as(dtype: torch.dtype, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket of gradients in another dtype; torch's own hooks refuse bf16 on the CPU, which gloo supports.

    Args:
        dtype: dtype that is sent.
        bucket: gradients of one dtype.

    Returns:
        A future of the averaged bucket.
    """
    buffer = bucket.buffer()
    sent = buffer.to(dtype).div_(dist.get_world_size())
    work = dist.all_reduce(sent, async_op=True)
    assert work is not None

    def received(future: Future[list[Tensor]]) -> Tensor:
        return buffer.copy_(future.value()[0])

    return work.get_future().then(received)
