"""What a run shows: a callback and a logger that write everything down."""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger
from torch.distributed.tensor import DTensor


def kept(value: Any) -> Any:
    """A copy of a value that can travel between processes; of shards all ranks must take one, and get the whole."""
    if isinstance(value, DTensor):
        return value.detach().full_tensor().cpu()
    if isinstance(value, torch.Tensor):
        return value.detach().to_dense().cpu().clone() if value.is_sparse else value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {str(key): kept(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [kept(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return torch.as_tensor(value) if type(value).__module__ == "numpy" else f"<{type(value).__name__}>"


class Tape(Logger):
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int | None, dict[str, Any]]] = []

    @property
    def name(self) -> str:
        return "tape"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to keep."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.lines.append((step, dict(metrics)))

    def logged(self) -> list[list[Any]]:
        """[step, name, value] in the order of steps and names: how they are grouped into calls is not compared."""
        rows = [
            [-1 if step is None else step, key, kept(value)] for step, line in self.lines for key, value in line.items()
        ]
        return sorted(rows, key=lambda row: (row[0], row[1]))


class Watch(pl.Callback):
    """Keeps gradients, outputs, logged values and the order of hooks."""

    def __init__(self) -> None:
        self.gradients: list[Any] = []
        self.raw_gradients: list[Any] = []
        self.outputs: list[Any] = []
        self.evaluated: list[Any] = []
        self.metrics: list[Any] = []
        self.rates: list[Any] = []
        self.order: list[str] = []
        self.num_steps = 0

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.order.append("on_after_backward")
        self.raw_gradients.append(_gradients(module))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.order.append("on_before_optimizer_step")
        self.gradients.append(_gradients(module))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.order.append("on_train_batch_end")
        self.outputs.append(kept(outputs))
        self.metrics.append(kept(trainer.callback_metrics))
        self.rates.append([[float(g["lr"]) for g in one.param_groups] for one in trainer.optimizers])

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.order.append("on_validation_batch_end")
        self.evaluated.append(kept(outputs))

    def on_test_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.order.append("on_test_batch_end")
        self.evaluated.append(kept(outputs))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.order.append("on_validation_end")
        self.metrics.append(kept(trainer.callback_metrics))


def _gradients(module: Any) -> dict[str, Any]:
    return {name: kept(p.grad) for name, p in module.named_parameters() if p.grad is not None}


class LightWatch(pl.Callback):
    """Overrides one hook only, so that the lean loop leaves out what it can."""

    def __init__(self) -> None:
        self.metrics: list[Any] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.metrics.append(kept(trainer.callback_metrics))


class FullWatch(Watch):
    """The same with every hook overridden."""


def _noting(name: str) -> Any:
    def hook(self: FullWatch, *args: Any, **kwargs: Any) -> Any:
        self.order.append(name)
        return getattr(super(FullWatch, self), name)(*args, **kwargs)

    return hook


for _name in dir(pl.Callback):
    if _name.startswith("on_") and _name not in Watch.__dict__ and not _name.endswith("_checkpoint"):
        setattr(FullWatch, _name, _noting(_name))

WATCHES = {"usual": Watch, "light": LightWatch, "full": FullWatch}
