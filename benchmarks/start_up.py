"""Measure the time to the end of the first optimizer step: `python train.py`, its ranks, and a plain Lightning script.

    python benchmarks/start_up.py [--rounds 9] [--ranks 2 8]

All train the digits module with TensorBoard, validation and a checkpoint callback on the CPU, in processes of their own
that exit right after their first step. They run in turns, in alternating order, and the table shows the median ratios:
`train.py` to the plain script, and `strategy=ddp` on several ranks to `train.py`. Processor time is the user and system
time of all processes until their step has ended, which other load hardly affects; wall time is shown too.

`restart` is a run of two ranks whose first life ends after its first step: the seconds from the start of the second
life's processes, right after their rendezvous, to the end of its first step.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

ROOT = Path(__file__).parents[1]
FIRST_STEP_DONE = 77
"""The exit status after the first step."""


class EndAfterFirstStep(pl.Callback):
    """Exit right after the first optimizer step, without cleaning up.

    Args:
        folder: where each rank leaves its seconds of processor time, and since its process was started.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        life, is_rank = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), trainer.world_size > 1
        seconds = time.process_time() + (processor_seconds(os.getppid()) if is_rank and trainer.is_global_zero else 0.0)
        file = self.folder / f"life_{life}_rank_{trainer.global_rank}"
        file.with_suffix(".new").write_text(f"{seconds} {seconds_since_start()}")
        file.with_suffix(".new").rename(file)
        while len(list(self.folder.glob(f"life_{life}_rank_?"))) < trainer.world_size:
            time.sleep(0.01)  # the first that ends ends the others
        os._exit(FIRST_STEP_DONE)


def processor_seconds(pid: int) -> float:
    """User and system time of a process, without those that it has started."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def seconds_since_start() -> float:
    """Seconds since this process was started or forked."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


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
        callbacks=[ModelCheckpoint(folder, monitor="val/loss", save_last=True), EndAfterFirstStep(folder)],
    )
    trainer.fit(DigitsClassifier(), datamodule=DigitsDataModule())


def train_command(folder: str, *overrides: str) -> list[str]:
    return [
        str(ROOT / "train.py"), "accelerator=cpu", "trainer.max_steps=1", f"log_dir={folder}",
        "+callbacks.end._target_=start_up.EndAfterFirstStep", f"+callbacks.end.folder={folder}", *overrides,
    ]  # fmt: skip


def ranks_command(folder: str, ranks: int, *overrides: str) -> list[str]:
    return train_command(folder, "strategy=ddp", f"devices={ranks}", *overrides)


def measure(command: list[str], folder: str, life: int = 0) -> tuple[float, float]:
    """Run a Python command to the end of its first step; return processor and wall time in seconds."""
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # use compiled files, like in normal use
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    wall, found = time.perf_counter() - start, list(Path(folder).glob(f"life_{life}_rank_*"))
    if not found:
        raise RuntimeError(f"{command} ended with status {done.returncode}: {done.stderr[-2000:]}")
    return sum(float(file.read_text().split()[0]) for file in found), wall


def compare(rounds: int, ranks: Sequence[int]) -> None:
    names = ["lightning", "train.py", *(f"ddp on {num} ranks" for num in ranks)]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    restarts: list[float] = []
    for number in range(rounds + 1):
        for name in names[:: -1 if number % 2 else 1]:
            with tempfile.TemporaryDirectory() as folder:
                num = int(name.split()[2]) if name.startswith("ddp") else None
                own = [__file__, "--plain", folder] if name == "lightning" else train_command(folder)
                found = measure(own if num is None else ranks_command(folder, num), folder)
            if number:  # the first round warms up the file caches
                times[name].append(found)
        if number and ranks:
            restarts.append(restart())
    for index, clock in enumerate(("processor", "wall")):
        for name, base in zip(names[1:], ["lightning", *["train.py"] * len(ranks)], strict=True):
            mine, others = ([pair[index] for pair in times[which]] for which in (name, base))
            ratio = statistics.median(own / other for own, other in zip(mine, others, strict=True))
            seconds = f"{base} {statistics.median(others):6.2f} s   {name} {statistics.median(mine):6.2f} s"
            print(f"{clock:10s} {seconds:50s} {ratio:5.2f} x")
    if restarts:
        print(
            f"restart    {statistics.median(restarts):.2f} s from the start of the new ranks to the end of their step"
        )


def restart() -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = ranks_command(folder, 2, "launcher.max_restarts=1")
        measure(command, folder, life=1)
        return float(Path(folder, "life_1_rank_0").read_text().split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="runs of each")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 8], help="numbers of ranks")
    parser.add_argument("--plain", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        plain_lightning(options.plain)
        raise AssertionError("the process must exit after the first step")
    compare(options.rounds, options.ranks)


if __name__ == "__main__":
    main()
