"""Measure the overhead of trainers on a tiny step, as a multiple of a hand-written PyTorch loop.

    python benchmarks/step_overhead.py [--cases bare typical validate test predict ddp] [--rounds 9] [--steps 600]

In every round each trainer runs right after the hand-written loop; the table shows the median ratio of the two. Times
are processor time of the process, which other load does not affect (wall time for `ddp`, where waiting counts).
Accelerate and Ignite are measured if they are installed.
"""

import argparse
import contextlib
import importlib.util
import io
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from tiny_step import BATCH, Module, Net, RankTimer, make_loader, make_shared_loader
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.tensorboard import SummaryWriter

from evener.trainer import Trainer

# --------------------------------------------------------------------------------------------------------- training


def hand_written(watch: RankTimer, loader: DataLoader[Any], model: nn.Module | None = None) -> None:
    net = Net() if model is None else model
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for inputs, targets in loader:
        watch.tick()
        loss = nn.functional.cross_entropy(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def lightning(cls: type[pl.Trainer], typical: bool, **options: Any) -> Callable[[RankTimer, DataLoader[Any]], None]:
    def run(watch: RankTimer, loader: DataLoader[Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            given: dict[str, Any] = {"max_epochs": 1, "accelerator": "cpu", "enable_model_summary": False, **options}
            if not typical:
                given |= {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
            trainer = cls(default_root_dir=folder, **given)
            trainer.fit(Module(watch, 3 if typical else 0), loader)

    return run


def accelerate(typical: bool) -> Callable[[RankTimer, DataLoader[Any]], None]:
    from accelerate import Accelerator
    from tqdm import tqdm

    def run(watch: RankTimer, loader: DataLoader[Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            accelerator = Accelerator(cpu=True, log_with="tensorboard" if typical else None, project_dir=folder)
            if typical:
                accelerator.init_trackers("run")
            net: Any = Net()
            net, optimizer, batches = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-2), loader)
            for index, (inputs, targets) in enumerate(tqdm(batches) if typical else batches):
                watch.tick()
                loss = nn.functional.cross_entropy(net(inputs), targets)
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
                if typical and (index + 1) % 50 == 0:
                    shown = {"loss": loss.item(), "scaled": loss.item() * 2, "index": index}
                    accelerator.log(shown, step=index)
            if typical:
                accelerator.save_state(folder + "/state")
                accelerator.end_training()

    return run


def ignite(typical: bool) -> Callable[[RankTimer, DataLoader[Any]], None]:
    from ignite.contrib.handlers import ProgressBar
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver

    def run(watch: RankTimer, loader: DataLoader[Any]) -> None:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)

        def step(engine: Any, batch: Any) -> Any:
            watch.tick()
            loss = nn.functional.cross_entropy(net(batch[0]), batch[1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        engine = Engine(step)
        with tempfile.TemporaryDirectory() as folder:
            if typical:
                ProgressBar().attach(engine)
                saver: Any = DiskSaver(folder, require_empty=False)
                engine.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint({"net": net}, saver))
                writer = SummaryWriter(folder)

                @engine.on(Events.ITERATION_COMPLETED(every=50))
                def log(engine: Any) -> None:
                    at = engine.state.iteration
                    writer.add_scalar("loss", engine.state.output.item(), at)
                    writer.add_scalar("scaled", engine.state.output.item() * 2, at)
                    writer.add_scalar("index", at, at)

            engine.run(loader, max_epochs=1)
            if typical:
                writer.close()  # its thread still writes to the folder

    return run


# ------------------------------------------------------------------------------------------------------- evaluation


def hand_written_evaluation(watch: RankTimer, loader: DataLoader[Any]) -> None:
    net, total = Net().eval(), torch.zeros(())
    with torch.inference_mode():
        for inputs, targets in loader:
            watch.tick()
            total += nn.functional.cross_entropy(net(inputs), targets) * len(inputs)


def hand_written_prediction(watch: RankTimer, loader: DataLoader[Any]) -> None:
    net, predictions = Net().eval(), []
    with torch.inference_mode():
        for inputs, _ in loader:
            watch.tick()
            predictions.append(net(inputs))


def lightning_evaluation(cls: type[pl.Trainer], stage: str) -> Callable[[RankTimer, DataLoader[Any]], None]:
    def run(watch: RankTimer, loader: DataLoader[Any]) -> None:
        trainer = cls(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
            enable_model_summary=False,
        )  # fmt: skip
        silent = {} if stage == "predict" else {"verbose": False}
        getattr(trainer, stage)(Module(watch, 0), loader, **silent)

    return run


# ------------------------------------------------------------------------------------------------------------ cases

Contender = Callable[[RankTimer, DataLoader[Any]], None]
MakeLoader = Callable[[int], DataLoader[Any]]


def contenders(case: str) -> tuple[Contender, dict[str, Contender]]:
    if case in ("bare", "typical"):
        typical = case == "typical"
        found = {"evener": lightning(Trainer, typical), "lightning": lightning(pl.Trainer, typical)}
        for name, make in (("accelerate", accelerate), ("ignite", ignite)):
            if importlib.util.find_spec(name):
                found[name] = make(typical)
            else:
                print(f"{name} is not installed: not measured")
        return hand_written, found
    bare = hand_written_prediction if case == "predict" else hand_written_evaluation
    return bare, {"evener": lightning_evaluation(Trainer, case), "lightning": lightning_evaluation(pl.Trainer, case)}


def measure(contender: Contender, steps: int, clock: Callable[[], float], make: MakeLoader) -> float:
    watch = RankTimer(clock, steps)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        contender(watch, make(steps))
    return watch.seconds()


def compare(
    bare: Contender,
    found: dict[str, Contender],
    rounds: int,
    steps: int,
    clock: Callable[[], float],
    make: MakeLoader = make_loader,
) -> list[tuple[str, float, float]]:
    """Return name, seconds per step and ratio of each, the hand-written loop first."""
    times: dict[str, list[float]] = {name: [] for name in ("hand-written", *found)}
    ratios: dict[str, list[float]] = {name: [] for name in found}
    for number in range(rounds + 1):
        for name, contender in found.items():
            base, mine = measure(bare, steps, clock, make), measure(contender, steps, clock, make)
            if number:  # the first round warms up imports and caches
                times["hand-written"].append(base)
                times[name].append(mine)
                ratios[name].append(mine / base)
    rows = [("hand-written", statistics.median(times["hand-written"]), 1.0)]
    return rows + [(name, statistics.median(times[name]), statistics.median(ratios[name])) for name in found]


def show(case: str, rows: list[tuple[str, float, float]]) -> None:
    for name, seconds, ratio in rows:
        print(f"{case:10s} {name:14s} {seconds * 1e6:8.1f} us/step {ratio:7.2f} x", flush=True)


def run_ddp(rank: int, port: int, rounds: int, steps: int) -> None:
    from datetime import timedelta

    import pytorch_lightning.strategies as pl_strategies

    from evener.strategies import DDPStrategy

    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "benchmark",
    }  # fmt: skip
    quiet()
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=300))

    def bare(watch: RankTimer, loader: DataLoader[Any]) -> None:
        sampler: Any = DistributedSampler(loader.dataset, shuffle=False)  # type: ignore[arg-type]
        own = DataLoader(loader.dataset, batch_size=BATCH, sampler=sampler, collate_fn=loader.collate_fn)
        hand_written(watch, own, nn.parallel.DistributedDataParallel(Net()))

    def ddp(cls: type[pl.Trainer], make: Callable[[], Any]) -> Contender:
        return lambda watch, loader: lightning(cls, False, strategy=make(), devices=2)(watch, loader)

    found = {"evener": ddp(Trainer, DDPStrategy), "lightning": ddp(pl.Trainer, pl_strategies.DDPStrategy)}
    rows = compare(bare, found, rounds, steps, time.perf_counter, make_shared_loader)
    if rank == 0:
        show("ddp", rows)


def quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("pytorch_lightning", "lightning_fabric", "accelerate", "ignite"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = ["bare", "typical", "validate", "test", "predict", "ddp"]
    parser.add_argument("--cases", nargs="+", default=cases, choices=cases)
    parser.add_argument("--rounds", type=int, default=9, help="pairs per trainer")
    parser.add_argument("--steps", type=int, default=600, help="steps per measurement, warm-up included")
    options = parser.parse_args()
    quiet()
    print(f"python {sys.version.split()[0]}, torch {torch.__version__}, lightning {pl.__version__}")
    for case in options.cases:
        if case == "ddp":
            port = 29500 + os.getpid() % 2000
            torch.multiprocessing.spawn(run_ddp, (port, options.rounds, options.steps), nprocs=2)  # type: ignore[attr-defined]
        else:
            show(case, compare(*contenders(case), options.rounds, options.steps, time.process_time))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
