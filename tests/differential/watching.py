"""What a run shows: a callback that writes everything down."""

from typing import Any

import pytorch_lightning as pl
from outcomes import kept


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
