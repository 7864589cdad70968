"""The runs of `survival.py`: draw one, start it, and read what it has written."""

import faulthandler
import json
import math
import os
import random
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from survival_module import Diary
from survival_processes import Terminal

from evener import strategies
from evener.trainer import Trainer
from evener.trainer.checkpoint import Checkpoint
from evener.trainer.checkpoint.file_io import find_newest
from evener.trainer.loggers import CSVLogger

ROOT = Path(__file__).parents[1]
NUM_EPOCHS = 2
TIMEOUT_S = 6.0
"""Seconds after which a rank gives its peers up."""

STRATEGIES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    # name: class, options, devices, ranks
    "single_device": ("SingleDeviceStrategy", {}, 1, 1),
    "dp": ("DataParallelStrategy", {}, 2, 1),
    "balanced_dp": ("BalancedDataParallelStrategy", {"weights": [1, 2]}, 2, 1),
    "model_parallel": ("ModelParallelStrategy", {}, 2, 1),
    "ddp": ("DDPStrategy", {}, 2, 2),
    "ddp global": ("DDPStrategy", {"batch_size_is": "global"}, 2, 2),
    "balanced_ddp": ("BalancedDDPStrategy", {"weights": [1, 2]}, 2, 2),
    "ddp_model_parallel": ("DDPModelParallelStrategy", {}, 4, 2),
    "balanced_ddp_model_parallel": ("BalancedDDPModelParallelStrategy", {"weights": [1, 2]}, 4, 2),
}
LOADERS: list[dict[str, Any]] = [
    {"dataset": "map"},
    {"dataset": "map", "num_workers": 2},
    {"dataset": "map", "num_workers": 1, "persistent_workers": True},
    {"dataset": "stream"},
    {"dataset": "stream", "num_workers": 2},
]
VAL_LOADERS: list[dict[str, Any]] = [
    {}, {"loaders": 2}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True},
]  # fmt: skip
STEPS = ["StepLR", "plateau", "plateau", "cyclic", "restarts", "two optimizers"]
SAVES: list[tuple[str, dict[str, Any]]] = [  # group of conf/checkpoint, options
    ("every_n_steps", {"every_n_steps": 1}),
    ("every_n_steps", {"every_n_steps": 3}),
    ("every_n_steps", {"every_n_steps": 2, "background": True}),
    ("last", {"every_n_epochs": 1}),
    ("best", {"every_n_epochs": 1, "monitor": "val/loss", "save_top_k": 2}),
    ("interval", {"interval_s": 0.0}),
]
OPTIONS: list[dict[str, Any]] = [
    {}, {"accumulate_grad_batches": 3}, {"val_check_interval": 0.5}, {"check_val_every_n_epoch": 2},
    {"accumulate_grad_batches": 2, "exact_accumulation": True},
]  # fmt: skip
CALLBACKS = ["none", "EarlyStopping", "a second Checkpoint", "LearningRateMonitor", "SWA", "EMA"]


@dataclass
class Run:
    """One kind of run, as it was drawn."""

    strategy: str
    loader: dict[str, Any]
    val_loader: dict[str, Any]
    save: tuple[str, dict[str, Any]]
    options: dict[str, Any]
    callback: str
    command: bool
    max_restarts: int = 0
    pause_s: float = 0.01
    sabotage: str = ""
    steps: str = "StepLR"
    terminal: bool = False

    @property
    def num_ranks(self) -> int:
        return STRATEGIES[self.strategy][3]

    def __str__(self) -> str:
        parts = " ".join(map(json.dumps, (self.loader, self.val_loader, self.save[1], self.options)))
        how = f"train.py (max_restarts={self.max_restarts})" if self.command else f"script ({self.callback})"
        return f"{how} {self.strategy} {self.steps} {parts}{' in a terminal' if self.terminal else ''}"


def draw(dice: random.Random, command: bool, sabotage: str = "") -> Run:
    """Draw a run whose parts go together."""
    options, loader = dice.choice(OPTIONS), dice.choice(LOADERS)
    if loader["dataset"] == "stream" and "val_check_interval" in options:
        options = {}  # a fraction of an unknown length
    strategy, steps, callback = dice.choice(list(STRATEGIES)), dice.choice(STEPS), dice.choice(CALLBACKS)
    if steps == "two optimizers":  # one loss for all stages; the trainer accumulates, and averages, for one optimizer
        steps = "StepLR" if "model_parallel" in strategy or "accumulate_grad_batches" in options else steps
        callback = "none" if callback in ("SWA", "EMA") else callback
    return Run(
        strategy, loader, dice.choice(VAL_LOADERS), dice.choice(SAVES), options, callback, command,
        dice.choice([0, 2]) if command else 0, sabotage=sabotage, steps=steps, terminal=dice.random() < 0.3,
    )  # fmt: skip


def start(run: Run, folder: Path, attempt: int) -> tuple[int, Terminal | None]:
    """Start an attempt at a run, from the newest checkpoint of its folder; return its process, and its terminal."""
    output = folder / f"output{attempt}"
    terminal = Terminal(output) if run.terminal else None
    place = output if terminal is None else terminal.path
    return (_start_command if run.command else _start_script)(run, folder, place), terminal


def _start_script(run: Run, folder: Path, output: Path) -> int:
    """Start a plain script: fork instead of importing everything again."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        file = os.open(output, os.O_RDWR | os.O_CREAT)  # a terminal controls who may read from it
        os.dup2(file, 1)
        os.dup2(file, 2)
        faulthandler.register(signal.SIGUSR2)  # `end_all` asks what is left where it is
        _train(run, folder)
        status = 0
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else 1
    except BaseException:  # noqa: BLE001  # the end of this process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _train(run: Run, folder: Path) -> None:
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import (
        EarlyStopping,
        EMAWeightAveraging,
        LearningRateMonitor,
        StochasticWeightAveraging,
    )

    warnings.simplefilter("ignore")
    pl.seed_everything(7, workers=True, verbose=False)
    cls, options, devices, num_ranks = STRATEGIES[run.strategy]
    callbacks: dict[str, Any] = {
        "EarlyStopping": lambda: EarlyStopping("val/loss", patience=100),
        "a second Checkpoint": lambda: Checkpoint(
            folder / "checkpoints", filename="second-{step}", every_n_steps=4, save_last=False
        ),
        "LearningRateMonitor": LearningRateMonitor,
        "SWA": lambda: StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=1),
        "EMA": lambda: EMAWeightAveraging(decay=0.8),
    }
    trainer = Trainer(
        strategy=getattr(strategies, cls)(**options, **({"timeout_s": TIMEOUT_S} if num_ranks > 1 else {})),
        devices=devices if num_ranks > 1 or devices == 1 else ["cpu"] * devices,
        accelerator="cpu",
        max_epochs=NUM_EPOCHS,
        callbacks=[
            Checkpoint(folder / "checkpoints", **run.save[1]),
            *([callbacks[run.callback]()] if run.callback in callbacks else []),
        ],
        logger=CSVLogger(folder, name="", version="") if run.callback == "LearningRateMonitor" else False,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **run.options,
    )
    newest = find_newest(folder)
    module = Diary(str(folder), run.loader, run.val_loader, run.pause_s, run.sabotage, run.steps)
    trainer.fit(module, ckpt_path=None if newest is None else str(newest))


def _start_command(run: Run, folder: Path, output: Path) -> int:
    """Start `train.py`; what a killed attempt has logged after its checkpoint stays in its own run's directory."""
    _, options, devices, num_ranks = STRATEGIES[run.strategy]
    group, save = run.save
    module = {
        "folder": str(folder), "loader": run.loader, "val_loader": run.val_loader, "pause_s": run.pause_s,
        "sabotage": run.sabotage, "steps": run.steps,
    }  # fmt: skip
    strategy = {**options, **({"timeout_s": TIMEOUT_S} if num_ranks > 1 else {})}
    words = [
        f"strategy={run.strategy.split()[0]}", f"devices={devices}", "accelerator=cpu", f"log_dir={folder}/logs",
        f"resume={'last' if any(folder.rglob('*.ckpt')) else 'null'}", f"launcher.max_restarts={run.max_restarts}",
        "data=none", "module=custom", "module._target_=survival_module.Diary", "logger=csv", "callbacks=none",
        f"trainer.max_epochs={NUM_EPOCHS}", "trainer.log_every_n_steps=1", "test_after_fit=false", "seed=7",
        f"checkpoint={group}", *_overrides("+module", module), *_overrides("++checkpoint", save),
        *_overrides("++strategy", strategy), *_overrides("++trainer", run.options),
    ]  # fmt: skip
    paths = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            file = os.open(output, os.O_RDWR | os.O_CREAT)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.chdir(folder)
            os.environ["PYTHONPATH"] = paths
            os.execv(sys.executable, [sys.executable, str(ROOT / "train.py"), *words])
        finally:
            os._exit(1)
    return pid


def _overrides(group: str, values: dict[str, Any]) -> list[str]:
    return [f"{group}.{name}={_word(value)}" for name, value in values.items()]


def _word(value: Any) -> str:
    """A value as Hydra's command line reads it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_word(item)}" for key, item in value.items()) + "}"
    return json.dumps(value) if not isinstance(value, str) else value or "''"


class Life:
    """What one process of a rank has written (`survival_module.Diary`).

    Attributes:
        lines: phases and batches, without one that a kill has cut.
    """

    def __init__(self, path: Path) -> None:
        since_ns, rank, pid = path.stem.split("-")
        self.since_ns, self.rank, self.pid = int(since_ns), int(rank), int(pid)
        self.lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def count(self, phase: str) -> int:
        return sum(line[0] == phase for line in self.lines)

    @property
    def batches(self) -> list[list[Any]]:
        """Epoch, number, samples and loss of each batch."""
        return [line[1:] for line in self.lines if line[0] == "batch"]


def lives(folder: Path, since_ns: int = 0) -> list[Life]:
    """All processes of ranks that have begun since, in order."""
    return [life for life in map(Life, sorted(folder.glob("*.life"))) if life.since_ns > since_ns]


def saved_batches(run: Run, num_done: int, per_epoch: int) -> int:
    """How many batches the newest checkpoint must have seen, by its trigger, once so many are done and the next began.

    >>> run = Run("ddp", {}, {}, ("every_n_steps", {"every_n_steps": 3}), {"accumulate_grad_batches": 2}, "", False)
    >>> [saved_batches(run, done, 11) for done in (5, 6, 11, 12, 13)]  # 6 steps per epoch, the last of one batch
    [0, 6, 11, 11, 11]
    """
    trigger = run.save[1]
    per_step = run.options.get("accumulate_grad_batches", 1)
    steps_per_epoch = math.ceil(per_epoch / per_step)
    epoch, in_epoch = divmod(max(num_done, 0), per_epoch)
    if "every_n_epochs" in trigger:
        return epoch * per_epoch
    if "interval_s" in trigger:
        return max(num_done, 0)
    every = trigger["every_n_steps"]
    step = (epoch * steps_per_epoch + in_epoch // per_step) // every * every
    if trigger.get("background"):  # the newest may still be on its way
        step = max(step - every, 0)
    epoch, in_epoch = divmod(step, steps_per_epoch)
    return epoch * per_epoch + in_epoch * per_step


def difference(run: Run, whole: Path, folder: Path) -> str:
    """Say how a disturbed run differs from an undisturbed one; empty if it does not."""
    for rank in range(run.num_ranks):
        expected = [batch for life in lives(whole) if life.rank == rank for batch in life.batches]
        known = [batch[:2] for batch in expected]
        reached = 0
        for number, life in enumerate(life for life in lives(folder) if life.rank == rank):
            if not life.batches:
                continue
            if life.batches[0][:2] not in known:
                return f"rank {rank}, process {number}: batch {life.batches[0][:2]} is not one of the run's"
            first = known.index(life.batches[0][:2])
            if first > reached:
                return f"rank {rank}, process {number}: begins at batch {first}, after {reached}"
            if life.batches != expected[first : first + len(life.batches)]:
                return f"rank {rank}, process {number}: other samples or losses from batch {first} on"
            reached = max(reached, first + len(life.batches))
        if reached != len(expected):
            return f"rank {rank}: {reached} of {len(expected)} batches"
    return _difference_of_files(run, whole, folder)


def _difference_of_files(run: Run, whole: Path, folder: Path) -> str:
    ends = [find_newest(where) for where in (whole, folder)]
    if None in ends:
        return f"newest checkpoints: {ends}"
    expected, actual = (torch.load(path, weights_only=True) for path in ends if path is not None)
    for checkpoint in (expected, actual):
        checkpoint["exact_resume"].pop("rows")  # by path
        for rank in checkpoint["exact_resume"]["ranks"]:
            for loader in rank["loaders"]:
                loader.pop("start")  # of the epoch that is over, which the process that ends the run may not have begun
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step", "loops", "exact_resume"):
        if found := _unequal(expected[key], actual[key], key):
            return f"newest checkpoint: {found}"
    tables = [path.read_text() for where in (whole, folder) for path in where.glob("metrics.csv")]
    return "metrics.csv" if tables and tables[0] != tables[-1] else ""


def _unequal(a: Any, b: Any, where: str) -> str:
    """The first place where two nested values differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return f"{where}: keys {sorted(map(str, a.keys() ^ b.keys()))}"
        return next((found for key in a if (found := _unequal(a[key], b[key], f"{where}.{key}"))), "")
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        found = (_unequal(x, y, f"{where}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)))
        return next(filter(None, found), "")
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return "" if a.shape == b.shape and torch.equal(a, b) else where
    return "" if a == b or (a != a and b != b) else f"{where} ({str(a)[:60]} and {str(b)[:60]})"
