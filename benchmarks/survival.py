"""Kill, freeze and damage runs at random, and count what was not survived.

    python benchmarks/survival.py --kills 300 --files 1000 --seed 0

Each run is drawn from the seed: a strategy, loaders, callbacks, when checkpoints are saved. It is done once without
disturbance, then once more while the command, a rank, or all processes at once are killed, frozen or asked to stop, in
one phase or another, and each time resumed. Both must have seen the same samples and losses, bit by bit, and end with
the same weights and metrics. Most runs are plain scripts, forked from this process; `--commands` are `train.py`.

| counted | |
|---|---|
| different | a resumed run saw another sample, loss, metric or weight than the one left alone |
| lost | a run was resumed before what had been saved |
| hung | a run did not end in time after a kill, a freeze or a signal |
| orphans | processes that outlived their run |
| failed | a run that was not disturbed ended with an error, or a good checkpoint was refused |
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from survival_files import damage_files
from survival_module import BATCH_SIZE, NUM_SAMPLES, Told

from evener import strategies
from evener.trainer import Trainer
from evener.trainer.checkpoint import Checkpoint
from evener.trainer.checkpoint.find import find_newest

ROOT = Path(__file__).parents[1]
NUM_EPOCHS = 2
TIMEOUT_S = 6.0
"""Seconds after which a rank gives its peers up."""
END_S = 90.0
"""Seconds after which a run that should end counts as hung."""
LEAVE_S = 15.0
"""Seconds that data workers of a killed process have to notice: torch's look every 5."""

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
}
LOADERS: list[dict[str, Any]] = [
    {"dataset": "map"},
    {"dataset": "map", "num_workers": 2},
    {"dataset": "map", "num_workers": 1, "persistent_workers": True},
    {"dataset": "stream"},
    {"dataset": "stream", "num_workers": 2},
]
VAL_LOADERS: list[dict[str, Any]] = [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}]
SAVES: list[dict[str, Any]] = [
    {"every_n_steps": 1}, {"every_n_steps": 3}, {"every_n_steps": 2, "async": True}, {"every_n_epochs": 1},
    {"every_n_epochs": 1, "monitor": "val/loss", "save_top_k": 2}, {"interval_s": 0.0},
]  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {}, {"accumulate_grad_batches": 3}, {"val_check_interval": 0.5},
    {"accumulate_grad_batches": 2, "exact_accumulation": True},
]  # fmt: skip
CALLBACKS = ["none", "EarlyStopping", "a second Checkpoint", "LearningRateMonitor"]
PHASES = ["start", "step", "step", "validation", "save", "epoch end", "end"]
ACTS = [*["kill"] * 5, "freeze", "freeze and thaw", "stop"]


@dataclass
class Run:
    """One kind of run, as it was drawn."""

    strategy: str
    loader: dict[str, Any]
    val_loader: dict[str, Any]
    save: dict[str, Any]
    options: dict[str, Any]
    callback: str
    command: bool
    pause_s: float = 0.02

    @property
    def num_ranks(self) -> int:
        return STRATEGIES[self.strategy][3]

    def __str__(self) -> str:
        parts = (self.loader, self.val_loader, self.save, self.options)
        how = "train.py" if self.command else "script"
        return f"{how} {self.strategy} {' '.join(map(json.dumps, parts))} {self.callback}"


@dataclass
class Counts:
    """What has happened."""

    acts: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    resumes: int = 0
    equal: int = 0
    different: int = 0
    lost: int = 0
    hung: int = 0
    orphans: int = 0
    failed: int = 0


def draw(dice: random.Random, command: bool) -> Run:
    """Draw a run whose parts go together."""
    strategy = dice.choice(["ddp", "ddp global", "ddp_model_parallel"] if command else list(STRATEGIES))
    loader = dice.choice(LOADERS)
    options = dice.choice(OPTIONS)
    if loader["dataset"] == "stream":  # of unknown length; each rank has a stream of its own, or they share one
        options = {name: value for name, value in options.items() if name != "val_check_interval"}
    return Run(strategy, loader, dice.choice(VAL_LOADERS), dice.choice(SAVES), options, dice.choice(CALLBACKS), command)


def train(run: Run, folder: Path, attempt: int) -> None:
    """Do an attempt at a run as a plain script does."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor
    from pytorch_lightning.loggers import CSVLogger

    pl.seed_everything(7, workers=True, verbose=False)
    cls, options, devices, num_ranks = STRATEGIES[run.strategy]
    callbacks: list[Any] = [Checkpoint(folder / "checkpoints", **run.save)]
    if run.callback == "EarlyStopping":
        callbacks.append(EarlyStopping("val/loss", patience=100))
    if run.callback == "a second Checkpoint":
        callbacks.append(Checkpoint(folder / "checkpoints", filename="second-{step}", every_n_steps=4, save_last=False))
    if run.callback == "LearningRateMonitor":
        callbacks.append(LearningRateMonitor())
    waits = {"timeout_s": TIMEOUT_S} if num_ranks > 1 else {}
    trainer = Trainer(
        strategy=getattr(strategies, cls)(**options, **waits),
        devices=devices if num_ranks > 1 or devices == 1 else ["cpu"] * devices,
        accelerator="cpu",
        max_epochs=NUM_EPOCHS,
        callbacks=callbacks,
        logger=CSVLogger(folder) if run.callback == "LearningRateMonitor" else False,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **run.options,
    )
    newest = find_newest(folder / "checkpoints")
    module = Told(str(folder), attempt, run.loader, run.val_loader, run.pause_s)
    trainer.fit(module, ckpt_path=None if newest is None else str(newest))


def start(run: Run, folder: Path, attempt: int) -> int:
    """Start an attempt in a session of its own; return its process."""
    output = folder / f"output{attempt}"
    if run.command:
        return start_command(run, folder, attempt, output)
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        train(run, folder, attempt)
        status = 0
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else 1
    except BaseException:  # noqa: BLE001  # it ends this process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def start_command(run: Run, folder: Path, attempt: int, output: Path) -> int:
    """Start `train.py`."""
    _, options, devices, _ = STRATEGIES[run.strategy]
    newest = find_newest(folder / "checkpoints")
    module = {
        "folder": str(folder), "attempt": attempt, "loader": run.loader, "val_loader": run.val_loader,
        "pause_s": run.pause_s,
    }  # fmt: skip
    save = {"_target_": "evener.trainer.checkpoint.Checkpoint", "dirpath": str(folder / "checkpoints"), **run.save}
    words = [
        f"strategy={run.strategy.split()[0]}", f"devices={devices}", f"strategy.timeout_s={TIMEOUT_S}",
        "accelerator=cpu", "data=none", "module=custom", "module._target_=survival_module.Told", "checkpoint=none",
        "logger=none", "callbacks=none", f"log_dir={folder}/logs", "seed=7", "monitor=val/loss",
        f"trainer.max_epochs={NUM_EPOCHS}", "trainer.log_every_n_steps=1", "test_after_fit=false",
        f"resume={newest or 'null'}",
        *_overrides("+module", module), *_overrides("+checkpoint", save), *_overrides("++strategy", options),
        *_overrides("++trainer", run.options),
    ]  # fmt: skip
    paths = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    with open(output, "w") as file:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *words], stdout=file, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": paths}, cwd=folder, start_new_session=True,
        )  # fmt: skip
    return process.pid


def _overrides(group: str, values: dict[str, Any]) -> list[str]:
    return [f"{group}.{name}={_word(value)}" for name, value in values.items()]


def _word(value: Any) -> str:
    """A value as Hydra's command line reads it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_word(item)}" for key, item in value.items()) + "}"
    return json.dumps(value) if not isinstance(value, str) else value


def disturb(
    run: Run, folder: Path, attempt: int, pid: int, dice: random.Random, counts: Counts
) -> tuple[str, int | None]:
    """Wait for a phase, and do something to a process of the run.

    Returns:
        What was done, and the exit status where the run had ended by itself.
    """
    phase, after, delay_s = dice.choice(PHASES), dice.randint(1, 12), dice.random() * 0.03
    act, target = dice.choice(ACTS), dice.randint(-2, run.num_ranks - 1)  # -2: all, -1: the script or command
    if act == "freeze" and run.num_ranks == 1:
        act = "freeze and thaw"
    if act.startswith("freeze") and target < 0:
        target = 0
    if phase in ("start", "epoch end", "end"):
        after = 1
    deadline = time.monotonic() + END_S
    pids: list[int] = []
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return "nothing", os.waitstatus_to_exitcode(status)
        lines = phases(folder, attempt, max(target, 0))
        if sum(line[1] == phase for line in lines) >= after:
            pids = [read[-1][0] for r in range(run.num_ranks) if (read := phases(folder, attempt, r))]
            if len(pids) == run.num_ranks:
                break
        if time.monotonic() > deadline:
            counts.hung += 1
            return "nothing", None
        time.sleep(0.002)
    time.sleep(delay_s)
    counts.acts[act] += 1
    counts.phases[phase] += 1
    signum = {"kill": signal.SIGKILL, "stop": signal.SIGTERM}.get(act, signal.SIGSTOP)
    with suppress(ProcessLookupError):
        if target == -2:
            os.killpg(pid, signum)
        else:
            os.kill(pid if target == -1 else pids[target], signum)
        if act == "freeze and thaw":
            time.sleep(1)
            os.kill(pids[target], signal.SIGCONT)
    return act, None


def phases(folder: Path, attempt: int, rank: int) -> list[tuple[int, str]]:
    """(process, phase) of a rank so far."""
    path = folder / f"phases{attempt}.{rank}"
    text = path.read_text() if path.exists() else ""
    lines = [line.split(" ", 1) for line in text.splitlines() if " " in line]
    return [(int(process), name) for process, name in lines]


def wait(pid: int, counts: Counts) -> int | None:
    """Wait for the end of a run; end it where it does not come."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    counts.hung += 1
    for process in members(pid):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def members(session: int) -> list[int]:
    """The processes of a session that are alive."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(int(path.parent.name))
    return found


def sweep(session: int, counts: Counts) -> None:
    """Count and end what has outlived its run."""
    deadline = time.monotonic() + LEAVE_S
    while (left := members(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    counts.orphans += len(left)
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def batches(folder: Path, attempt: int, rank: int) -> list[list[Any]]:
    """What a rank trained on in an attempt; a line that a kill has cut is left out."""
    path = folder / f"batches{attempt}.{rank}"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def saved_batches(run: Run, num_begun: int, per_epoch: int) -> int:
    """How many batches must be in a checkpoint once so many have begun."""
    done = max(num_begun - 1, 0)
    if "every_n_epochs" in run.save:
        return done // per_epoch * per_epoch
    every = run.save.get("every_n_steps", 1) * (
        1 if "interval_s" in run.save else run.options.get("accumulate_grad_batches", 1)
    )
    kept = done - (every if run.save.get("async") else 0)
    in_epoch = kept % per_epoch  # steps are fewer at an epoch's end, where accumulation is cut short
    return max(0, kept - in_epoch + in_epoch // every * every - (0 if every == 1 else every))


def compare(run: Run, whole: Path, folder: Path, num_attempts: int, counts: Counts) -> str:
    """Compare a disturbed run with one left alone.

    Returns:
        What is different; empty where nothing is.
    """
    for rank in range(run.num_ranks):
        expected = batches(whole, 0, rank)
        places = [line[:2] for line in expected]
        per_epoch = len(expected) // NUM_EPOCHS
        reached = 0
        for attempt in range(num_attempts):
            seen = batches(folder, attempt, rank)
            if not seen:
                continue
            if seen[0][:2] not in places:
                return f"rank {rank}, attempt {attempt}: batch {seen[0][:2]} is none of the run's"
            first = places.index(seen[0][:2])
            if seen != expected[first : first + len(seen)]:
                return f"rank {rank}, attempt {attempt}: other samples or losses from batch {first} on"
            if first < saved_batches(run, reached, per_epoch):
                counts.lost += 1
                print(f"LOST {run}: attempt {attempt} began at batch {first} of {reached} begun ({folder})", flush=True)
            reached = max(reached, first + len(seen))
        if reached != len(expected):
            return f"rank {rank}: {reached} of {len(expected)} batches"
    ends = [torch.load(path, weights_only=True) for path in (whole / "end0", *sorted(folder.glob("end*"))[-1:])]
    if len(ends) < 2 or ends[0]["metrics"] != ends[1]["metrics"]:
        return "other metrics"
    same = all(torch.equal(value, ends[1]["weights"][name]) for name, value in ends[0]["weights"].items())
    return "" if same else "other weights"


def survive(run: Run, home: Path, num_kills: int, dice: random.Random, counts: Counts) -> None:
    """Do a run undisturbed, and once more with disturbances."""
    whole, folder = home / "whole", home / "disturbed"
    whole.mkdir(parents=True)
    folder.mkdir()
    pid = start(run, whole, 0)
    status = wait(pid, counts)
    sweep(pid, counts)
    if status != 0:
        counts.failed += 1
        print(f"FAILED {run}: status {status}\n{(whole / 'output0').read_text()[-3000:]}", flush=True)
        return
    attempt, status = 0, 1
    while status != 0 and attempt < num_kills + 5:
        pid = start(run, folder, attempt)
        act = "nothing"
        if attempt < num_kills:
            act, status = disturb(run, folder, attempt, pid, dice, counts)
        if act != "nothing" or attempt >= num_kills:
            status = wait(pid, counts)
        sweep(pid, counts)
        counts.resumes += attempt > 0
        attempt += 1
        if act == "nothing" and status != 0:
            counts.failed += 1
            print(f"FAILED {run}: status {status}\n{(folder / f'output{attempt - 1}').read_text()[-3000:]}", flush=True)
            return
    found = compare(run, whole, folder, attempt, counts)
    if found:
        counts.different += 1
        print(f"DIFFERENT {run}: {found} ({folder})", flush=True)
    else:
        counts.equal += 1


def show(counts: Counts, files: dict[str, int], elapsed_s: float) -> None:
    """Print the table."""
    rows = {
        "kills": counts.acts["kill"],
        "freezes": counts.acts["freeze"] + counts.acts["freeze and thaw"],
        "stops": counts.acts["stop"],
        "resumes": counts.resumes,
        "runs bitwise equal": counts.equal,
        "different": counts.different,
        "lost": counts.lost,
        "hung": counts.hung,
        "orphans": counts.orphans,
        "failed": counts.failed,
        **{f"files {name}": number for name, number in files.items()},
    }
    print(f"phases: {', '.join(f'{name} {number}' for name, number in sorted(counts.phases.items()))}")
    print(f"{elapsed_s:.0f} s\n\n| | |\n|---|---:|")
    for name, number in rows.items():
        print(f"| {name} | {number} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="disturbances of plain scripts, and of forked ranks")
    parser.add_argument("--commands", type=int, default=0, help="disturbances of train.py, which takes longer to start")
    parser.add_argument("--files", type=int, default=1000, help="damaged files")
    parser.add_argument("--per-run", type=int, default=5, help="disturbances of one run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep the folder of the runs")
    given = parser.parse_args()
    dice, counts, since_s = random.Random(given.seed), Counts(), time.monotonic()
    home = Path(tempfile.mkdtemp(prefix="survival-"))
    number = 0
    for num_kills, command in ((given.kills, False), (given.commands, True)):
        done_before = counts.acts.total()
        while (left := num_kills - (counts.acts.total() - done_before)) > 0 and counts.failed < 5:
            survive(draw(dice, command), home / str(number), min(given.per_run, left), dice, counts)
            number += 1
    files = damage_files(home / "files", given.files, dice)
    show(counts, files, time.monotonic() - since_s)
    bad = counts.different + counts.lost + counts.hung + counts.orphans + counts.failed
    bad += sum(files[name] for name in ("accepted altered", "crashed the search", "ran code"))
    if not (bad or given.keep):
        subprocess.run(["rm", "-rf", str(home)], check=True)
    else:
        print(f"\nkept: {home}")
    return int(bad > 0)


if __name__ == "__main__":
    print(
        f"{NUM_SAMPLES} samples in batches of {BATCH_SIZE}, {NUM_EPOCHS} epochs; torch {torch.__version__}", flush=True
    )
    sys.exit(main())
