"""After ddp in a plain script it goes on as after one device: trainer, module, callbacks, optimizer, random numbers."""

import random
import threading
import warnings
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from distributed import run_script
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.tuner import Tuner
from regression import assert_same, trainer_of
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import ConfigError
from evener.strategies.distributed.store import RankError
from evener.trainer import Trainer
from evener.trainer.checkpoint import Checkpoint


class History(pl.Callback):
    """Keeps what it sees in plain attributes, as scripts do."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.num_failed = 0

    def on_exception(self, *_: Any) -> None:
        self.num_failed += 1

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        self.epochs: list[int] = []
        self.late: torch.nn.Module | None = None

    def configure_model(self) -> None:
        if self.late is None:
            self.late = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.ones_(self.late.weight)

    def setup(self, stage: str) -> None:
        self.register_buffer("not_saved", torch.ones(1), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert self.late is not None
        return self.late(self.layers(inputs))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self(batch[0]).square().mean()
        self.log("loss", loss.detach(), on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self(batch[0]).square().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def on_train_epoch_end(self) -> None:
        self.epochs.append(self.current_epoch)
        self.last = {"epoch": self.current_epoch}  # came back empty: it was set twice, and cleared before

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, _halve)]


def _halve(epoch: int) -> float:
    return 0.5**epoch


def made(strategy: str, folder: Path, **options: Any) -> Trainer:
    callbacks = [History(), EarlyStopping("val", patience=5), Checkpoint(folder, monitor="val")]
    exact: dict[str, Any] = {"precision": "64-true", "enable_checkpointing": True, "callbacks": callbacks}
    return trainer_of(strategy, **exact, **options)


def data() -> DataLoader[Any]:
    inputs = torch.arange(27.0, dtype=torch.float64).reshape(9, 3) / 27
    return DataLoader(TensorDataset(inputs), 4)


def script(strategy: str, folder: Path) -> dict[str, Any]:
    """What a script sees after each of its calls."""
    torch.set_num_threads(1)
    pl.seed_everything(5, verbose=False)
    module = Net().eval()  # BatchNorm's running statistics are not part of the comparison
    weight = module.layers[0].weight
    trainer = made(strategy, folder)
    history: Any = trainer.callbacks[0]
    trainer.fit(module, data(), data())
    early, best = trainer.early_stopping_callback, trainer.checkpoint_callback
    trainer.save_checkpoint(folder / "final.ckpt")
    saved = torch.load(folder / "final.ckpt", weights_only=True)
    seen = {
        "progress": (trainer.global_step, trainer.current_epoch, str(trainer.state.status), trainer.should_stop),
        "metrics": [dict(m) for m in (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)],
        "history": (len(history.losses), list(module.epochs), [type(each).__name__ for each in trainer.callbacks]),
        "scores": (early.best_score, best.best_model_score, Path(best.best_model_path).name),
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "made by a hook": dict(module.last),
        "same objects": weight is module.layers[0].weight,
        "in optimizer": weight in trainer.optimizers[0].state,
        "optimizer": trainer.optimizers[0].state_dict(),
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "checkpoint": [saved[key] for key in ("global_step", "epoch", "optimizer_states", "state_dict")],
        "random": (random.random(), np.random.rand(), torch.rand(1)),
    }
    trainer.fit_loop.max_epochs = 3  # the same trainer trains on
    trainer.fit(module, data(), data())
    seen["trained on"] = (trainer.global_step, len(history.losses), module.epochs)
    predictor = made(strategy, folder / "predict")
    seen["predicted"] = torch.cat(predictor.predict(module, data()))
    seen["validated"] = predictor.validate(module, data(), verbose=False)
    return seen


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("shards", marks=pytest.mark.slow)])
def test_a_script_goes_on_as_after_one_device(strategy: str, tmp_path: Path) -> None:
    # After fsdp the script's module had rank 0's shards, with which neither it nor the trainer could go on.
    ours, single = (run_script(script, name, tmp_path / name) for name in (strategy, "single"))
    assert_same(ours, single, 1e-10)
    assert single["progress"][:2] == (6, 2)
    assert single["trained on"][0] == 9


class Locked(History):
    lock: Any = None

    def on_train_start(self, *_: Any) -> None:
        self.lock = threading.Lock()


def slow(module: pl.LightningModule) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.125)


def look(folder: Path) -> list[str]:
    """What a script is told in a fit, after which it finds its callbacks and its module's methods."""
    trainer = made("ddp", folder)
    trainer.callbacks[0] = locked = Locked()
    module: Any = Net().eval()
    module.configure_optimizers = MethodType(slow, module)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(module, data(), data())
    assert trainer.callbacks[0] is locked
    assert len(locked.losses) == 6
    # it was looked up by its function's name: 'Net' object has no attribute 'slow', after training
    assert module.configure_optimizers().param_groups[0]["lr"] == 0.125
    trainer.save_checkpoint(folder / "final.ckpt")
    trainer._checkpoint_connector.restore(folder / "final.ckpt")  # in the script, which did not make the loaders
    return [str(warning.message) for warning in told]


def test_a_script_has_what_its_ranks_have_used_and_is_told_what_cannot_be_brought_back(tmp_path: Path) -> None:
    told = run_script(look, tmp_path)
    assert any("Locked.lock: can't be brought back from the processes that trained" in text for text in told), told


class Failing(Net):
    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            raise ValueError("not again")


class Refusing(Net):
    def on_train_start(self) -> None:
        raise ConfigError("no such thing. Give another.")


def fail(folder: Path) -> None:
    trainer = made("ddp", folder)
    history: Any = trainer.callbacks[0]
    with pytest.raises(RankError, match="not again"):
        trainer.fit(Failing().eval(), data(), data())
    assert trainer.callbacks[0] is history
    assert (history.num_failed, history.losses) == (0, []), "the ranks' own have counted the failure"
    with pytest.raises(ConfigError, match=r"^no such thing. Give another.$"):
        made("ddp", folder).fit(Refusing(), data(), data())


def test_a_failure_of_the_ranks_is_one_of_fit_which_leaves_the_script_its_callbacks(tmp_path: Path) -> None:
    run_script(fail, tmp_path)


def tune(strategy: str, folder: Path) -> dict[str, Any]:
    """Search for a learning rate, which ends the search's run by an exception, and train."""
    torch.set_num_threads(1)
    pl.seed_everything(5, verbose=False)
    module = Net().eval()
    trainer = made(strategy, folder, default_root_dir=folder)
    history: Any = trainer.callbacks[0]
    alike = DataLoader(TensorDataset(torch.ones(12, 3, dtype=torch.float64)), 4)  # rank 0's loss is that of all
    found = Tuner(trainer).lr_find(module, alike, data(), num_training=20, early_stop_threshold=None)
    assert found is not None
    seen = {"losses": found.results["loss"], "rates": found.results["lr"], "suggestion": found.suggestion()}
    seen |= {"module's": module.lr, "state": str(trainer.state), "step": trainer.global_step}
    assert module.trainer is trainer
    assert trainer.callbacks[0] is history
    assert history.losses == []
    trainer.fit(module, data(), data())
    return seen | {"trained": trainer.global_step, "weights": module.state_dict()}


def test_a_tuner_finds_in_a_script_what_it_finds_on_one_device(tmp_path: Path) -> None:
    ours, single = (run_script(tune, name, tmp_path / name) for name in ("ddp", "single"))
    assert_same(ours, single, 1e-10)
    assert single["trained"] == 6
