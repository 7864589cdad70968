"""What is trained, in words that no framework owns, and what was seen of it."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
"""`x`, `labels`, and `i`, the samples' numbers; each of shape (N, ...)."""


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@dataclass(frozen=True)
class Problem:
    """A training.

    Args:
        net: makes the network, after torch was seeded.
        loss: the loss of a batch, as users write it; with `tokens` it is also given what to divide its sum by.
        data: makes the dataset, of dicts with the keys of a `Batch`.
        batch_size: samples of one forward pass, over all ranks.
        ranks: number of processes.
        accumulate: forward passes per optimizer step.
        shuffle: whether a framework draws the order itself; each draws another one.
        batches: numbers of the samples of each batch, for the loop by hand; None for those of `batch_size`.
        schedule: makes a scheduler, which is stepped after every optimizer step.
        clip: largest norm of the gradients; 0 for any.
        ddp: options of `torch.nn.parallel.DistributedDataParallel`.
        validation: makes the dataset to validate on after every epoch, or `validations` times in one.
        score: values to average over the validation's samples, of shape (N,).
        tokens: whether the framework may be told to divide by the number of labels other than -100, where it offers to.
        unwrapped: whether the loss calls another method of the network than `forward`.
        manual: whether the step calls backward and the optimizer itself, where the framework has this mode.
        strategy: name of the strategy, of frameworks that have several.
        early: whether the optimizer is made with the network, before the framework has taken either.
        save: whether a checkpoint is saved after every step; a later run in the same folder goes on from the newest.
        device: type of the device; on an accelerator only times are noted of a batch, which costs no wait.
        waits: steps before which the host waits for the device, so that times between them are the device's.
    """

    net: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    data: Callable[[], Any]
    batch_size: int = 8
    ranks: int = 1
    accumulate: int = 1
    epochs: int = 1
    max_steps: int = -1
    shuffle: bool = False
    batches: list[list[int]] | None = None
    workers: int = 0
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    clip: float = 0.0
    seed: int = 7
    ddp: dict[str, Any] = field(default_factory=dict[str, Any])
    validation: Callable[[], Any] | None = None
    validations: int = 1
    score: Callable[[Any, Batch], Tensor] | None = None
    tokens: bool = False
    unwrapped: bool = False
    manual: bool = False
    strategy: str = ""
    early: bool = False
    save: bool = False
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    waits: tuple[int, ...] = ()

    @property
    def rank_batch(self) -> int:
        return self.batch_size // self.ranks


class Run:
    """One attempt at a problem, in one rank.

    Args:
        problem: what is trained.
        folder: for its checkpoints, and those of earlier attempts.
        kill_after: number of optimizer steps after which this process kills itself, as the next begins; 0 for never.
    """

    def __init__(self, problem: Problem, folder: Path, kill_after: int = 0) -> None:
        self.problem, self.folder, self.kill_after = problem, folder, kill_after
        self.rank = int(os.environ.get("RANK", "0"))
        self.seen: list[list[int]] = []
        self.inputs: list[list[float]] = []
        self.validated: list[int] = []
        self.times: list[tuple[float, float]] = []
        self.outcome: dict[str, Any] = {}

    def begin(self, batch: Batch) -> None:
        """Note the batch whose step begins, or be killed."""
        if self.kill_after and len(self.seen) == self.kill_after * self.problem.accumulate:
            os.kill(os.getpid(), signal.SIGKILL)
        if len(self.times) in self.problem.waits:
            torch.accelerator.synchronize()
        self.times.append((time.perf_counter(), time.process_time()))
        if self.problem.device != "cpu":
            return
        self.seen.append(batch["i"].tolist())
        self.inputs.append(batch["x"].flatten(1).double().sum(1).tolist())

    def validate(self, batch: Batch) -> None:
        self.validated += batch["i"].tolist()

    def end(self, net: nn.Module, steps: int, **values: Any) -> None:
        """Note how the training has ended: weights, optimizer steps, and what the framework says of `val`, `loss`."""
        weights = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in net.parameters()]
        flat = torch.cat([weight.detach().cpu().flatten() for weight in weights])
        now = (time.perf_counter(), time.process_time())
        self.outcome = {
            "weights": flat, "steps": steps, "seen": self.seen, "inputs": self.inputs, "validated": self.validated,
            "times": [*self.times, now], **{name: float(value) for name, value in values.items()},
        }  # fmt: skip

    def newest(self, pattern: str) -> tuple[Path, int] | None:
        """The checkpoint with the largest number in its name, and that number."""
        found = [(int("".join(filter(str.isdigit, path.stem.rpartition("step")[2]))), path)
                 for path in self.folder.glob(pattern)]  # fmt: skip
        return (max(found)[1], max(found)[0]) if found else None
