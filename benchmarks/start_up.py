"""Measure the time to the end of the first optimizer step: `python train.py` and a plain Lightning script.

    python benchmarks/start_up.py [--pairs 9]

Both train the digits module with TensorBoard, validation and a checkpoint callback on the CPU, each in a separate
process that exits right after its first step. The two run in pairs, in alternating order, and the table shows the
median ratio. Processor time is the children's user and system time, which other load hardly affects; wall time is shown
too.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

ROOT = Path(__file__).parents[1]
FIRST_STEP_DONE = 77
"""The exit status after the first step."""


class EndAfterFirstStep(pl.Callback):
    """Exit right after the first optimizer step, without cleaning up."""

    def on_train_batch_end(self, *args: Any) -> None:
        os._exit(FIRST_STEP_DONE)


def plain_lightning(folder: str) -> None:
    """The equivalent script without this project, with the same module and data."""
    from pytorch_lightning.callbacks import ModelCheckpoint
    from pytorch_lightning.loggers import TensorBoardLogger

    # the digits import an exception from the strategies, which a plain script would not load
    bare = types.ModuleType("evener.strategies")
    bare.__path__ = [str(ROOT / "strategies")]
    sys.modules["evener.strategies"] = bare
    from evener.examples.digits import DigitsClassifier, DigitsDataModule

    pl.seed_everything(42, workers=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=TensorBoardLogger(folder),
        callbacks=[ModelCheckpoint(folder, monitor="val/loss", save_last=True), EndAfterFirstStep()],
    )
    trainer.fit(DigitsClassifier(), datamodule=DigitsDataModule())


def train_command(folder: str) -> list[str]:
    return [
        str(ROOT / "train.py"), "accelerator=cpu", "trainer.max_steps=1", f"log_dir={folder}",
        "+callbacks.end._target_=start_up.EndAfterFirstStep",
    ]  # fmt: skip


def measure(command: list[str]) -> tuple[float, float]:
    """Run a Python command to the end of its first step; return processor and wall time in seconds."""
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # use compiled files, like in normal use
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != FIRST_STEP_DONE:
        raise RuntimeError(f"{command} ended with status {done.returncode}: {done.stderr[-2000:]}")
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def compare(pairs: int) -> None:
    times: dict[str, list[tuple[float, float]]] = {"lightning": [], "train.py": []}
    for number in range(pairs + 1):
        for name in sorted(times, reverse=bool(number % 2)):
            with tempfile.TemporaryDirectory() as folder:
                command = train_command(folder) if name == "train.py" else [__file__, "--plain", folder]
                found = measure(command)
            if number:  # the first pair warms up the file caches
                times[name].append(found)
    for index, clock in enumerate(("processor", "wall")):
        plain, ours = ([pair[index] for pair in times[name]] for name in times)
        ratio = statistics.median(mine / base for mine, base in zip(ours, plain, strict=True))
        seconds = f"lightning {statistics.median(plain):5.2f} s   train.py {statistics.median(ours):5.2f} s"
        print(f"{clock:10s} {seconds} {ratio:7.2f} x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9, help="runs of each")
    parser.add_argument("--plain", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        plain_lightning(options.plain)
        raise AssertionError("the process must exit after the first step")
    compare(options.pairs)


if __name__ == "__main__":
    main()
