"""What a run shows: a callback that writes everything down."""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch
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


def flat(value: Any, *path: Any) -> dict[tuple[Any, ...], Any]:
    """The leaves of dicts and lists, by their paths."""
    if not isinstance(value, (Mapping, list, tuple)):
        return {path: value}
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {place: leaf for key, item in items for place, leaf in flat(item, *path, key).items()}


class Watch(pl.Callback):
    """Keeps gradients, outputs, logged values and the order of hooks."""

    names = ("raw_gradients", "gradients", "outputs", "rates", "order", "metrics", "evaluated")

    def __init__(self) -> None:
        self.seen: dict[str, list[Any]] = {name: [] for name in self.names}

    def note(self, hook: str, **values: Any) -> None:
        self.seen["order"].append(hook)
        for name, value in values.items():
            self.seen[name].append(value)

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.note("on_after_backward", raw_gradients=_gradients(module))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.note("on_before_optimizer_step", gradients=_gradients(module))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rates = [[float(g["lr"]) for g in one.param_groups] for one in trainer.optimizers]
        self.note("on_train_batch_end", outputs=kept(outputs), metrics=kept(trainer.callback_metrics), rates=rates)

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.note("on_validation_batch_end", evaluated=kept(outputs))

    def on_test_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.note("on_test_batch_end", evaluated=kept(outputs))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.note("on_validation_end", metrics=kept(trainer.callback_metrics))


def _gradients(module: Any) -> dict[str, Any]:
    return {name: kept(p.grad) for name, p in module.named_parameters() if p.grad is not None}


class LightWatch(pl.Callback):
    """Overrides one hook only, so that the lean loop leaves out what it can."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Any]] = {name: [] for name in Watch.names}

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen["metrics"].append(kept(trainer.callback_metrics))


class FullWatch(Watch):
    """The same with every hook overridden."""


def _noting(name: str) -> Any:
    def hook(self: FullWatch, *args: Any, **kwargs: Any) -> Any:
        self.seen["order"].append(name)
        return getattr(super(FullWatch, self), name)(*args, **kwargs)

    return hook


for _name in dir(pl.Callback):
    if _name.startswith("on_") and _name not in Watch.__dict__ and not _name.endswith("_checkpoint"):
        setattr(FullWatch, _name, _noting(_name))

WATCHES = {"usual": Watch, "light": LightWatch, "full": FullWatch}
