"""Run a case under a strategy and keep all that can be seen of it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import late_device
import pytorch_lightning as pl
import pytorch_lightning.callbacks as plc
import torch
from outcomes import Failure, kept
from tiny import Points, Thaw, quiet

from evener.strategies import STRATEGIES

from .loading import eval_loader, train_loader
from .subject import make_subject
from .watching import WATCHES

if TYPE_CHECKING:
    from .cases import Case, Spread

OWN_OPTIONS = ("exact_accumulation", "detect_nonfinite")


@dataclass
class Observed:
    """What a run showed, and how it failed if it did."""

    seen: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None


def callbacks(folder: Path) -> dict[str, Callable[[], pl.Callback]]:
    """Lightning's callbacks, by name."""
    pruned = {"pruning_fn": "l1_unstructured", "amount": 0.3}
    return {
        "early_stopping": lambda: plc.EarlyStopping("val_monitor", patience=1, min_delta=0.01),
        "early_stopping_train": lambda: plc.EarlyStopping("step_loss", patience=0, check_on_train_epoch_end=True),
        "lr_monitor": lambda: plc.LearningRateMonitor("step", log_momentum=True, log_weight_decay=True),
        "lr_monitor_epoch": lambda: plc.LearningRateMonitor("epoch"),
        "swa": lambda: plc.StochasticWeightAveraging(0.05, swa_epoch_start=1),
        "ema": lambda: plc.EMAWeightAveraging(decay=0.5),
        "averaging": plc.WeightAveraging,
        "accumulation": lambda: plc.GradientAccumulationScheduler({0: 2, 1: 1}),
        "pruning": lambda: plc.ModelPruning(use_global_unstructured=False, **pruned),
        "pruning_global": lambda: plc.ModelPruning(**pruned),
        "checkpoint_steps": lambda: plc.ModelCheckpoint(
            folder / "steps", monitor="step_loss", save_top_k=2, every_n_train_steps=1, filename="{step}"
        ),
        "checkpoint_val": lambda: plc.ModelCheckpoint(folder / "val", monitor="val_monitor", save_last=True),
        "checkpoint_epochs": lambda: plc.ModelCheckpoint(folder / "epochs", save_top_k=-1, every_n_epochs=1),
        "finetuning": Thaw,
    }


CALLBACKS = tuple(callbacks(Path()))
ON_CPU = ("stock", "single_device")
"""What others are compared with stays on the CPU."""
accelerator = "cpu"


def observe_on_late_devices(case: Case, spread: Spread, folder: str) -> Observed:
    """`observe`, in a process that has late devices from its first case on."""
    global accelerator
    if accelerator == "cpu":
        accelerator = "late"
        late_device.load(6)
    return observe(case, spread, folder)


def make_trainer(case: Case, spread: Spread, folder: Path, callbacks: list[pl.Callback], logger: Points) -> Any:
    """Lightning's trainer for `stock`, Evener's otherwise."""
    given: dict[str, Any] = dict(case.options.__dict__) | {
        "callbacks": callbacks, "logger": logger, "devices": spread.devices, "default_root_dir": folder,
        "accelerator": "cpu" if spread.kind in ON_CPU else accelerator,
        "enable_checkpointing": any("checkpoint" in name for name in case.callbacks),
    }  # fmt: skip
    if spread.kind == "stock":
        return quiet(pl.Trainer, **{name: value for name, value in given.items() if name not in OWN_OPTIONS})
    options = dict(spread.options)
    if spread.kind in ("dp", "balanced_dp", "model_parallel"):
        options["batch_dims"] = reductions(case)
    return quiet(strategy=STRATEGIES[spread.kind](**options), **given)


def reductions(case: Case) -> dict[str, str]:
    """The option `batch_dims` for results that no strategy can tell from means: sums, and values without samples."""
    sums = {"sum": ".total", "gram": "", "confusion": ""}.get(case.returns.evaluation)
    dims = {} if sums is None else {f"{step}{sums}": "sum" for step in ("validation_step", "test_step")}
    if case.returns.train == "ints":
        dims |= {"training_step.n": "sum", "training_step.correct": "sum"}
    if "collects_losses" in case.net.peculiar:
        dims |= {f"{step}.collected": "mean" for step in ("validation_step", "test_step")}
    return dims | ({"predict_step": "mean"} if case.returns.predict == "mean_vector" else {})


def observe(case: Case, spread: Spread, folder: str) -> Observed:
    """Fit, test and predict."""
    for name in ("pytorch_lightning", "lightning_fabric", "evener", "pytorch_lightning.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_default_dtype(getattr(torch, case.dtype))
    pl.seed_everything(0)
    observed, state = Observed(), _State()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _run(case, spread, Path(folder), observed.seen, state)
        except BaseException as exc:  # noqa: BLE001  # an exit is an outcome, too
            observed.failure = state.failure(exc)
    return observed


@dataclass
class _State:
    """How far a run is. Steps are read from the trainer: a hook on optimizers would change how the lean loop steps."""

    phase: str = "build"
    trainer: Any = None
    steps_before: int = 0

    def failure(self, exc: BaseException) -> Failure:
        num_steps = 0 if self.trainer is None else self.trainer.global_step - self.steps_before
        return Failure.of(exc, self.phase, num_steps)


def _run(case: Case, spread: Spread, folder: Path, seen: dict[str, Any], state: _State) -> None:
    checkpoint = None
    if case.resume_after:
        checkpoint = folder / "half.ckpt"
        first = replace(case, options=replace(case.options, max_steps=case.resume_after))
        trainer, module, *_ = _prepare(first, spread, folder)
        state.phase, state.trainer = "fit", trainer
        trainer.fit(module, **_data(case, module))
        trainer.save_checkpoint(checkpoint)
    trainer, module, watch, points = _prepare(case, spread, folder)
    state.trainer, data = trainer, _data(case, module)
    if case.before != "nothing" and case.loading.eval_kind != "none":
        state.phase = case.before
        given = {} if case.loading.given_by == "module" else {"dataloaders": eval_loader(case)}
        seen["before"] = kept(getattr(trainer, case.before)(module, **given))
    state.phase = "fit"
    trainer.fit(module, ckpt_path=checkpoint, weights_only=None if checkpoint is None else False, **data)
    if case.after == "fit":
        trainer.fit_loop.max_epochs += 1
        state.steps_before = trainer.global_step
        trainer.fit(module, **_data(case, module))
    seen["weights"] = {name: kept(p) for name, p in module.named_parameters()}
    seen["steps"] = [trainer.global_step, trainer.current_epoch]
    seen |= {name: list(values) for name, values in watch.seen.items()}
    for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        seen[name] = kept(getattr(trainer, name))
    seen["logger"] = [list(row) for row in sorted(points.seen, key=lambda row: row[:2])]
    seen["buffers"] = {name: kept(value) for name, value in module.state_dict().items() if "metric" not in name}
    for values in watch.seen.values():
        values.clear()
    state.phase = "save"
    trainer.save_checkpoint(folder / "final.ckpt")
    if trainer.is_global_zero:
        seen["checkpoint"] = _checkpoint(torch.load(folder / "final.ckpt", weights_only=False), folder)
    if case.loading.eval_kind == "none":
        return
    state.phase = "test"
    seen["test"] = kept(trainer.test(module, eval_loader(case), verbose=False))
    seen["test_outputs"] = watch.seen["evaluated"]
    if case.loading.eval_kind in ("max_size", "min_size"):
        return  # Lightning predicts from one loader after the other only
    state.phase = "predict"
    seen["predict"] = kept(trainer.predict(module, eval_loader(case)))


def _prepare(case: Case, spread: Spread, folder: Path) -> tuple[Any, Any, Any, Points]:
    """A trainer, a module, and what watches them."""
    module, watch, points, known = make_subject(case), WATCHES[case.watch](), Points(), callbacks(folder)
    watches = [*(known[name]() for name in case.callbacks), watch]
    return make_trainer(case, spread, folder, watches, points), module, watch, points


class Data(pl.LightningDataModule):
    """The loaders of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.train_dataloader = lambda: train_loader(case)
        if case.loading.eval_kind != "none":
            self.val_dataloader = lambda: eval_loader(case)


def _data(case: Case, module: Any) -> dict[str, Any]:
    """The arguments of `fit` that give it its data."""
    if case.loading.given_by == "arguments":
        return {"train_dataloaders": train_loader(case), "val_dataloaders": eval_loader(case)}
    data = Data(case)
    if case.loading.given_by == "datamodule":
        return {"datamodule": data}
    module.train_dataloader = data.train_dataloader
    if case.loading.eval_kind != "none":
        module.val_dataloader = data.val_dataloader
    return {}


def _checkpoint(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    names = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "callbacks", "hyper_parameters")
    return {name: _portable(content.get(name), str(folder)) for name in names}


def _portable(value: Any, folder: str) -> Any:
    if isinstance(value, dict):
        return {str(key).replace(folder, ""): _portable(item, folder) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_portable(item, folder) for item in value]
    return value.replace(folder, "") if isinstance(value, str) else kept(value)
