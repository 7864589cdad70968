"""Measure the overhead of trainers on a tiny step, as a multiple of a loop written by hand that does the same work.

    python benchmarks/step_overhead.py [--cases bare typical rich validate_loss validate test predict]
        [--strategies single_device dp model_parallel ddp] [--rounds 7] [--steps 600]

`dp` and `model_parallel` run on two CPU devices of one process, `ddp` on two ranks. In every round each trainer runs
right after the hand-written loop; the table shows the median ratios, of processor time of the process (rank 0 for
`ddp`), which other load does not affect, and of wall time. Accelerate and Ignite are measured if they are installed
(the extra `benchmarks`).

    bare           forward, backward, optimizer step
    typical        three logged values (one in the bar, one an epoch mean), TensorBoard, progress bar, a list of
                   callbacks: an own one, LearningRateMonitor, ModelCheckpoint
    rich           typical, three torchmetrics, a scheduler per step, clipping, accumulation by 4, two loggers
    validate_loss  the mean loss, validated
    validate, test the mean loss and three torchmetrics
    predict        the outputs, kept
"""

import argparse
import contextlib
import io
import logging
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import pytorch_lightning.strategies as pl_strategies
import steps_by_hand
import steps_elsewhere
import torch
from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tiny_step import ACCUMULATE, CLIP, Module, SampleCount, Seconds, StepTimer, make_loader, make_shared_loader
from torch.utils.data import DataLoader

from evener.strategies import DataParallelStrategy, DDPStrategy, ModelParallelStrategy
from evener.trainer import Trainer

Contender = Callable[[StepTimer, DataLoader[Any]], None]

STRATEGIES: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {
    "single_device": {"evener": dict, "lightning": dict},
    "dp": {"evener": lambda: {"strategy": DataParallelStrategy(devices=["cpu", "cpu"])}},
    "model_parallel": {
        "evener": lambda: {"strategy": ModelParallelStrategy(["cpu", "cpu"], partition=["net.layers.2"])}
    },
    "ddp": {
        "evener": lambda: {"strategy": DDPStrategy(), "devices": 2},
        "lightning": lambda: {"strategy": pl_strategies.DDPStrategy(), "devices": 2},
    },
}


def fit(trainer: type[pl.Trainer], case: str, options: dict[str, Any], timer: StepTimer, loader: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {"max_epochs": 1, "accelerator": "cpu", "enable_model_summary": False, **options}
        if case == "bare":
            given |= {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        else:
            given["callbacks"] = [SampleCount(), LearningRateMonitor(), ModelCheckpoint()]
            given["logger"] = [TensorBoardLogger(folder)]
        if case == "rich":
            given |= {"gradient_clip_val": CLIP, "accumulate_grad_batches": ACCUMULATE}
            given["logger"] += [CSVLogger(folder, name="csv")]
        trainer(default_root_dir=folder, **given).fit(Module(timer, case), loader)


def evaluate(trainer: type[pl.Trainer], case: str, options: dict[str, Any], timer: StepTimer, loader: Any) -> None:
    made = trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, **options,
    )  # fmt: skip
    stage = case.removesuffix("_loss")
    silent = {} if stage == "predict" else {"verbose": False}
    getattr(made, stage)(Module(timer, "bare" if case == "validate_loss" else case), loader, **silent)


def contenders(case: str, strategy: str) -> dict[str, Contender]:
    """Each trainer's run of a case."""
    found: dict[str, Contender] = {}
    for name, options in STRATEGIES[strategy].items():
        run = fit if case in ("bare", "typical", "rich") else evaluate
        trainer = Trainer if name == "evener" else pl.Trainer

        def contend(
            timer: StepTimer, loader: Any, run: Any = run, trainer: Any = trainer, options: Any = options
        ) -> None:
            run(trainer, case, options(), timer, loader)

        found[name] = contend
    if strategy == "single_device" and case in steps_elsewhere.CASES:
        found |= {name: partial(run, case) for name, run in steps_elsewhere.INSTALLED.items()}
    return found


def by_hand(case: str, strategy: str) -> Contender:
    def run(timer: StepTimer, loader: Any) -> None:
        steps_by_hand.CASES[case](steps_by_hand.PLACEMENTS[strategy](), timer, loader)

    return run


def measure(contender: Contender, steps: int, make: Callable[[int], DataLoader[Any]]) -> Seconds:
    timer = StepTimer(steps)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        contender(timer, make(steps))
    return timer.seconds()


def compare(case: str, strategy: str, rounds: int, steps: int) -> list[str]:
    """Run a case under a strategy and return the lines of the table, the hand-written loop first."""
    make = make_shared_loader if strategy == "ddp" else make_loader
    hand, found = by_hand(case, strategy), contenders(case, strategy)
    base: list[Seconds] = []
    times: dict[str, list[Seconds]] = {name: [] for name in found}
    ratios: dict[str, list[Seconds]] = {name: [] for name in found}
    for number in range(rounds + 1):
        for name, contender in found.items():
            before, mine = measure(hand, steps, make), measure(contender, steps, make)
            if number:  # the first round warms up imports and caches
                base.append(before)
                times[name].append(mine)
                ratios[name].append(Seconds(mine.processor / before.processor, mine.wall / before.wall))
    lines = [line(case, strategy, "by hand", base, [Seconds(1.0, 1.0)])]
    return lines + [line(case, strategy, name, times[name], ratios[name]) for name in found]


def line(case: str, strategy: str, name: str, times: list[Seconds], ratios: list[Seconds]) -> str:
    def median(values: list[Seconds], clock: str) -> float:
        return statistics.median(getattr(value, clock) for value in values)

    cells = [f"{case:13s} {strategy:14s} {name:10s}"]
    for clock in ("processor", "wall"):
        cells.append(f"{clock} {median(times, clock) * 1e6:7.1f} us/step {median(ratios, clock):6.2f} x")
    return "   ".join(cells)


def run_ddp(rank: int, port: int, cases: list[str], rounds: int, steps: int) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "benchmark",
    }  # fmt: skip
    quiet()
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=300))
    for case in cases:
        lines = compare(case, "ddp", rounds, steps)
        if rank == 0:
            print("\n".join(lines), flush=True)
    torch.distributed.destroy_process_group()


def quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("pytorch_lightning", "lightning_fabric", "accelerate", "ignite"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = list(steps_by_hand.CASES)
    parser.add_argument("--cases", nargs="+", default=cases, choices=cases)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--rounds", type=int, default=7, help="pairs per trainer")
    parser.add_argument("--steps", type=int, default=600, help="steps per measurement, warm-up included")
    options = parser.parse_args()
    quiet()
    print(f"python {sys.version.split()[0]}, torch {torch.__version__}, lightning {pl.__version__}", flush=True)
    for name in sorted({"accelerate", "ignite"} - set(steps_elsewhere.INSTALLED)):
        print(f"{name} is not installed: not measured")
    for strategy in options.strategies:
        if strategy == "ddp":
            given = (29500 + os.getpid() % 2000, options.cases, options.rounds, options.steps)
            torch.multiprocessing.spawn(run_ddp, given, nprocs=2)  # type: ignore[attr-defined]
            continue
        for case in options.cases:
            print("\n".join(compare(case, strategy, options.rounds, options.steps)), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
