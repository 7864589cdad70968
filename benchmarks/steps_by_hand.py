"""Write by hand the loops that `step_overhead.py` compares trainers with, each doing the same work as the trainers."""

import copy
import csv
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from tiny_step import (
    ACCUMULATE,
    BATCH,
    CLIP,
    LOG_EVERY,
    Net,
    StepTimer,
    make_metrics,
    make_scheduler,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# ------------------------------------------------------------------------------------------------------ placements


class OneDevice:
    """The whole net on one device; the other placements change what differs."""

    def __init__(self) -> None:
        self.net = Net()

    def loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        return loader

    def begin_step(self) -> None:
        """Bring new weights to where they are used."""

    def logits(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def evaluated(self, inputs: Tensor) -> Tensor:
        return self.logits(inputs)

    def gradients(self, loss: Tensor) -> None:
        loss.backward()

    def accumulating(self) -> AbstractContextManager[None]:
        return nullcontext()


class TwoRanks(OneDevice):
    """A process per device, under DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.wrapped = nn.parallel.DistributedDataParallel(self.net)

    def loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        sampler: Any = DistributedSampler(loader.dataset, shuffle=False)  # type: ignore[arg-type]
        return DataLoader(loader.dataset, batch_size=BATCH, sampler=sampler, collate_fn=loader.collate_fn)

    def logits(self, inputs: Tensor) -> Tensor:
        return self.wrapped(inputs)

    def evaluated(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def accumulating(self) -> AbstractContextManager[None]:
        return self.wrapped.no_sync()


class TwoReplicas(OneDevice):
    """A second copy of the net: weights are copied to it, and its gradients added to the first's."""

    def __init__(self) -> None:
        super().__init__()
        self.copy = copy.deepcopy(self.net)
        self.own, self.others = list(self.net.parameters()), list(self.copy.parameters())

    def begin_step(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.others, self.own)

    def logits(self, inputs: Tensor) -> Tensor:
        first, second = inputs.chunk(2)
        return torch.cat([self.net(first), self.copy(second)])

    def gradients(self, loss: Tensor) -> None:
        loss.backward()
        with torch.no_grad():
            torch._foreach_add_([p.grad for p in self.own], [p.grad for p in self.others])  # type: ignore[misc]
        for parameter in self.others:
            parameter.grad = None


class TwoStages(OneDevice):
    """The net's layers on two devices."""

    def logits(self, inputs: Tensor) -> Tensor:
        first, relu, last = self.net.layers
        hidden = relu(first(inputs.to("cpu")))
        return last(hidden.to("cpu"))


PLACEMENTS: dict[str, type[OneDevice]] = {
    "single_device": OneDevice,
    "dp": TwoReplicas,
    "model_parallel": TwoStages,
    "ddp": TwoRanks,
}

# -------------------------------------------------------------------------------------------------------- training


def bare(place: OneDevice, timer: StepTimer, loader: DataLoader[Any]) -> None:
    optimizer = torch.optim.SGD(place.net.parameters(), lr=1e-2)
    for inputs, targets in place.loader(loader):
        timer.tick()
        place.begin_step()
        loss = nn.functional.cross_entropy(place.logits(inputs), targets)
        optimizer.zero_grad()
        place.gradients(loss)
        optimizer.step()


class Writers:
    """TensorBoard's writer and, if asked for, a CSV file."""

    def __init__(self, folder: str, with_csv: bool) -> None:
        self.tensorboard = SummaryWriter(folder)
        self.file = (Path(folder) / "metrics.csv").open("w", newline="") if with_csv else None

    def write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.tensorboard.add_scalar(name, value, step)
        if self.file is not None:
            csv.writer(self.file).writerow([step, *values.values()])

    def close(self) -> None:
        self.tensorboard.close()
        if self.file is not None:
            self.file.close()


def typical(place: OneDevice, timer: StepTimer, loader: DataLoader[Any]) -> None:
    """Three logged values, one of them an epoch mean; TensorBoard, bar, learning rate, sample count, checkpoint."""
    optimizer = torch.optim.SGD(place.net.parameters(), lr=1e-2)
    total, num_samples = torch.zeros(()), 0
    with tempfile.TemporaryDirectory() as folder:
        writers, bar = Writers(folder, with_csv=False), tqdm(place.loader(loader))
        for index, (inputs, targets) in enumerate(bar):
            timer.tick()
            place.begin_step()
            loss = nn.functional.cross_entropy(place.logits(inputs), targets)
            optimizer.zero_grad()
            place.gradients(loss)
            optimizer.step()
            scaled = loss.detach() * 2
            total += loss.detach() * len(inputs)
            num_samples += len(inputs)
            if (index + 1) % LOG_EVERY == 0:
                rate = optimizer.param_groups[0]["lr"]
                writers.write({"loss": loss.item(), "scaled": scaled.item(), "lr": rate}, index)
                bar.set_postfix(loss=loss.item(), refresh=False)
        writers.write({"mean_loss": (total / num_samples).item()}, timer.steps)
        torch.save({"net": place.net.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/last.pt")
        writers.close()


def rich(place: OneDevice, timer: StepTimer, loader: DataLoader[Any]) -> None:
    """The same with three torchmetrics, a scheduler, clipping, accumulation and two loggers."""
    optimizer = torch.optim.SGD(place.net.parameters(), lr=1e-2)
    scheduler, metrics = make_scheduler(optimizer), make_metrics()
    total, num_samples = torch.zeros(()), 0
    with tempfile.TemporaryDirectory() as folder:
        writers, bar = Writers(folder, with_csv=True), tqdm(place.loader(loader))
        for index, (inputs, targets) in enumerate(bar):
            timer.tick()
            stepping = (index + 1) % ACCUMULATE == 0
            if index % ACCUMULATE == 0:
                place.begin_step()
            with nullcontext() if stepping else place.accumulating():
                logits = place.logits(inputs)
                loss = nn.functional.cross_entropy(logits, targets)
                place.gradients(loss / ACCUMULATE)
            if stepping:
                nn.utils.clip_grad_norm_(place.net.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            metrics.update(logits.detach(), targets)
            scaled = loss.detach() * 2
            total += loss.detach() * len(inputs)
            num_samples += len(inputs)
            if (index + 1) % (LOG_EVERY * ACCUMULATE) == 0:
                rate = optimizer.param_groups[0]["lr"]
                writers.write({"loss": loss.item(), "scaled": scaled.item(), "lr": rate}, index)
                bar.set_postfix(loss=loss.item(), refresh=False)
        values = {name: value.item() for name, value in metrics.compute().items()}
        writers.write({"mean_loss": (total / num_samples).item(), **values}, timer.steps)
        torch.save({"net": place.net.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/last.pt")
        writers.close()


# ------------------------------------------------------------------------------------------------------ evaluation


def evaluate(place: OneDevice, timer: StepTimer, loader: DataLoader[Any], with_metrics: bool = True) -> None:
    place.net.eval()
    total, num_samples = torch.zeros(()), 0
    metrics = make_metrics()
    place.begin_step()
    with torch.inference_mode():
        for inputs, targets in place.loader(loader):
            timer.tick()
            logits = place.evaluated(inputs)
            total += nn.functional.cross_entropy(logits, targets) * len(inputs)
            num_samples += len(inputs)
            if with_metrics:
                metrics.update(logits, targets)
    if with_metrics:
        metrics.compute()


def evaluate_loss(place: OneDevice, timer: StepTimer, loader: DataLoader[Any]) -> None:
    evaluate(place, timer, loader, with_metrics=False)


def predict(place: OneDevice, timer: StepTimer, loader: DataLoader[Any]) -> None:
    place.net.eval()
    predictions = []
    place.begin_step()
    with torch.inference_mode():
        for inputs, _ in place.loader(loader):
            timer.tick()
            predictions.append(place.evaluated(inputs))


CASES: dict[str, Callable[[OneDevice, StepTimer, DataLoader[Any]], None]] = {
    "bare": bare,
    "typical": typical,
    "rich": rich,
    "validate_loss": evaluate_loss,
    "validate": evaluate,
    "test": evaluate,
    "predict": predict,
}
