"""Explain errors of torch that name neither the module nor what to change."""

import re
from typing import Any

import torch

from ...strategies.batch.structure import num_samples
from ...strategies.core.devices import is_out_of_memory, memory_bytes, peak_memory_bytes


class DeviceOutOfMemory(torch.OutOfMemoryError):
    """torch's error with the device, the number of samples and advice."""


_SHARED_MEMORY = (
    "The data workers need more shared memory (/dev/shm) than there is. Give the container more (docker run "
    "--shm-size=8g, or --ipc=host), or set data.num_workers=0"
)
_ADVICE = {
    "for file </torch_": _SHARED_MEMORY,
    "It is possible that dataloader's workers are out of shared memory": _SHARED_MEMORY,
    "element 0 of tensors does not require grad": (
        "The loss has no gradient: it was detached, computed without gradients or made of numbers, or all parameters "
        "that it depends on are frozen. Return the loss as training_step has computed it from the module's parameters"
    ),
    "out of bounds for storage of size 0": (
        "The backward pass needs parameters that strategy=fsdp has released, because training_step computes gradients "
        "itself (torch.autograd.grad, of a penalty). Set strategy.shard=[], or use strategy=ddp"
    ),
}
"""What torch says, and what to say in its place."""


def explain(trainer: Any, exc: RuntimeError | ValueError) -> None:
    """Say in an error of torch's what to change.

    Raises:
        DeviceOutOfMemory: instead of torch's or a library's error.
    """
    if isinstance(exc, RuntimeError) and is_out_of_memory(exc):
        raise _out_of_memory(trainer, str(exc)) from exc
    for words, advice in _ADVICE.items():
        if words in str(exc):
            exc.args = (f"{advice} ({exc}).",)


def _out_of_memory(trainer: Any, text: str) -> DeviceOutOfMemory:
    device, batch = trainer.strategy.root_device, getattr(trainer._results, "batch", None)
    count = None if batch is None else num_samples(batch)
    samples = "outside of a step" if count is None else f"{count} samples at once"
    if found := re.search(r"\bGPU (\d+)\b", text):
        device = torch.device((torch.accelerator.current_accelerator() or torch.device("cuda")).type, int(found[1]))
    if found := re.search(r"\[([^\[\]]+?),? on (\w+(?::\d+)?)\]$", text):  # a replica, named by the executor
        samples, device = found[1], torch.device(found[2])
    peak = peak_memory_bytes(device)
    reached = "unknown" if peak is None else f"{peak / 2**30:.1f} of {memory_bytes(device) / 2**30:.1f} GiB"
    return DeviceOutOfMemory(
        f"Out of memory on {device}, rank {trainer.global_rank}, in step {trainer.global_step}: {samples}, peak "
        f"{reached}. Make data.batch_size smaller and trainer.accumulate_grad_batches larger by the same factor, "
        "set precision=bf16-mixed, or use more devices; strategy=balanced_dp gives the first device less. "
        f"({text.splitlines()[0]})"
    )
