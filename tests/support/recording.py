"""A module and a callback that override everything and write down what is called, with which arguments."""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

EXTRA = (
    "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step", "setup",
    "teardown", "prepare_data", "transfer_batch_to_device", "configure_model", "configure_callbacks",
)  # fmt: skip


def hook_names(cls: type) -> list[str]:
    return [name for name in dir(cls) if (name.startswith("on_") and name != "on_gpu") or name in EXTRA]


def describe(value: Any) -> Any:
    """A value as something that compares equal where two runs did the same."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, tuple(value.shape), value.detach().flatten().tolist())
    if isinstance(value, torch.optim.Optimizer):
        return type(value).__name__
    if isinstance(value, (pl.Trainer, pl.LightningModule, torch.optim.lr_scheduler.LRScheduler)):
        return type(value).__mro__[-3 if isinstance(value, pl.Trainer) else 0].__name__
    if isinstance(value, Mapping):
        if "loops" in value:
            return ("checkpoint", sorted(value), describe(value["state_dict"]), describe(value["loops"]))
        return {key: describe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    if callable(value) or isinstance(value, BaseException):
        return type(value).__name__
    return repr(value)


class Tape:
    """What happened: the hook, its arguments, and what user code can see of the run at that moment."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def write(self, owner: str, name: str, trainer: Any, module: Any, args: Any, kwargs: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        progress = (loop.batch_progress, loop.automatic_optimization.optim_progress, loop.val_loop.batch_progress)
        seen = (
            module._current_fx_name, trainer.global_step, trainer.current_epoch, repr(trainer.state.stage),
            *map(repr, progress), torch.is_grad_enabled(), module.training,
        )  # fmt: skip
        self.calls.append((owner, name, describe(args), describe(kwargs), seen))

    def names(self) -> list[tuple[str, str]]:
        return [(call[0], call[1]) for call in self.calls]


class SmallModule(pl.LightningModule):
    """A linear model that logs in every way."""

    def __init__(self, scheduler: str = "none") -> None:
        super().__init__()
        self.scheduler = scheduler
        self.layer = torch.nn.Linear(4, 1)

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return ((self.layer(inputs) - targets) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        self.log("both", loss * 2, on_step=True, on_epoch=True, prog_bar=True)
        self.log("index", float(batch_idx))
        self.log_dict({"largest": loss, "smallest": -loss}, on_step=False, on_epoch=True, reduce_fx="max")
        return {"loss": loss, "extra": loss.detach() + 1}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        self.log("val_both", loss, on_step=True, on_epoch=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.scheduler == "none":
            return optimizer
        if self.scheduler == "plateau":
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return [optimizer], [{"scheduler": scheduler, "interval": self.scheduler}]


def _recorder(owner: str, name: str, cls: type) -> Any:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        if owner == "module":
            self.tape.write(owner, name, self.trainer, self, args, kwargs)
        else:
            self.tape.write(f"{owner}{self.number}", name, args[0], args[0].lightning_module, args[2:], kwargs)
        return getattr(super(cls, self), name)(*args, **kwargs)

    return hook


class RecordingModule(SmallModule):
    """`SmallModule` with every hook overridden."""

    def __init__(self, tape: Tape, scheduler: str = "none") -> None:
        super().__init__(scheduler)
        self.tape = tape


class RecordingCallback(pl.Callback):
    """A callback with every hook overridden."""

    def __init__(self, tape: Tape, number: int) -> None:
        self.tape = tape
        self.number = number

    @property
    def state_key(self) -> str:
        return f"recording{self.number}"


for _name in hook_names(pl.LightningModule):
    setattr(RecordingModule, _name, _recorder("module", _name, RecordingModule))
for _name in hook_names(pl.Callback):
    setattr(RecordingCallback, _name, _recorder("callback", _name, RecordingCallback))


def loader(samples: int = 22, batch_size: int = 4, seed: int = 0) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 4, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size)


class StatefulLoader:
    """Batches that go on where a checkpoint left them, under any trainer."""

    def __init__(self) -> None:
        self.batches = list(loader())
        self.position = self.start = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        self.position, self.start = self.start, 0
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position % len(self.batches)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"]
