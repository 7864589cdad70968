"""Kill ranks at drawn points, and measure what it costs and whether training is the same.

    python benchmarks/goodput.py --kills 200 --ranks 4 --seed 0             # survivors go on in place
    python benchmarks/goodput.py --kills 98 --ranks 8 --per-run 7 --seed 1  # of eight ranks seven die
    python benchmarks/goodput.py --kills 100 --ranks 4 --seed 2 --doubles 1 # a second one within 0.2 s of the first
    python benchmarks/goodput.py --kills 9 --ranks 4 --restarts 9           # all ranks are started anew
    python benchmarks/goodput.py --ranks 4 --cost 5                         # steps without failures, with and without

Each run of `train.py` is drawn from the seed, done once undisturbed, and once more while ranks kill or freeze
themselves (`goodput_module.py`). Compared: samples of each batch, weights and optimizers (1e-10, float64), metrics.csv
(1e-9) and TensorBoard's points (1e-6, float32), each once. A recovery lasts from the kill to the first
hook of the module in the new group, or process. Linux only.
"""

import argparse
import csv
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from goodput_module import KILL, STOP
from survival_processes import become_reaper, end_all, wait_for_end
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from evener.trainer import main as train

END_S = 240.0
POINTS = [
    "any", "forward", "backward", "reduction", "optimizer", "logging", "validating", "saving", "between epochs",
    "epoch start",
]  # fmt: skip
NUM_EPOCHS = 6


def drawn_options(dice: random.Random) -> dict[str, Any]:
    """What a run does, apart from the failures."""
    return {
        "strategy": dice.choice(["ddp", "ddp", "balanced_ddp"]),
        "+module.num_workers": dice.choice([0, 0, 2]),
        "+module.steps": dice.choice(["StepLR", "plateau", "cosine"]),
        "trainer.accumulate_grad_batches": dice.choice([1, 1, 2, 3]),
        "trainer.exact_accumulation": dice.choice([False, True]),
        "trainer.val_check_interval": dice.choice([1.0, 3]),
        "checkpoint": dice.choice(["best", "every_n_steps"]),
        "seed": dice.randrange(1000),
    }


def drawn_plan(ranks: int, kills: int, dice: random.Random, doubles: float) -> list[dict[str, Any]]:
    """Who ends how, and when; at least one rank stays."""
    victims = dice.sample(range(ranks), min(kills, ranks - 1))
    plan: list[dict[str, Any]] = []
    for number, rank in enumerate(victims):
        point = dice.choice(POINTS)
        if plan and plan[-1]["point"] != "after another" and dice.random() < doubles:
            point = "after another"
        of_step = point not in ("validating", "saving", "between epochs", "epoch start", "after another")
        times = dice.randint(3, 36) if of_step else dice.randint(2, 5)
        delay_s = {"any": 0.03, "reduction": 0.01, "logging": 0.003, "after another": 0.2}.get(point, 0.0)
        signum = STOP if dice.random() < 0.15 else KILL
        plan.append(
            {"number": number, "rank": rank, "point": point, "times": times, "delay_s": dice.random() * delay_s,
             "signal": signum}
        )  # fmt: skip
    return plan


def words(folder: Path, options: dict[str, Any], ranks: int, survive: bool, restarts: int, pause_s: float) -> list[str]:
    """The command line of a run."""
    given = dict(options)
    if given["strategy"] == "ddp":
        given["strategy.batch_size_is"] = "global"
    if given["checkpoint"] == "every_n_steps":
        given["checkpoint.every_n_steps"] = 4
    if restarts:
        given["checkpoint.snapshot_every_n_steps"] = 5
    return [
        *(f"{key}={value}" for key, value in given.items()), f"devices={ranks}", "accelerator=cpu", "data=none",
        "module=custom", "module._target_=goodput_module.Killed", f"+module.folder={folder}",
        f"+module.pause_s={pause_s}", f"launcher.survive={survive}", f"launcher.max_restarts={restarts}",
        "strategy.timeout_s=60", "logger=many", "callbacks=none", f"trainer.max_epochs={NUM_EPOCHS}",
        "trainer.precision=64-true", "trainer.log_every_n_steps=2", "test_after_fit=false", f"log_dir={folder}/logs",
        f"hydra.run.dir={folder}/run",
    ]  # fmt: skip


def run(folder: Path, command: list[str]) -> tuple[int | None, float]:
    """Run a command in a fork of this process; return its status, and the seconds that it took."""
    began_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            file = os.open(folder / "output", os.O_RDWR | os.O_CREAT)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.chdir(folder)
            sys.argv = ["train.py", *command]
            train()
            status = 0
        except SystemExit as exc:
            status = exc.code if isinstance(exc.code, int) else 1
            print(exc.code)
        except BaseException:  # noqa: BLE001  # the end of this process
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status = wait_for_end(pid, END_S)
    took_s = time.monotonic() - began_s
    end_all()
    return status, took_s


def lines(folder: Path) -> list[tuple[float, int, str, list[Any], str]]:
    """What all processes have told, in order of time: time, group, what, the rest, and who."""
    found: list[tuple[float, int, str, list[Any], str]] = []
    for path in folder.glob("*.life"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                told_s, group, what, *rest = json.loads(line)
                found.append((told_s, group, what, rest, path.stem))
    return sorted(found)


def batches(folder: Path) -> dict[tuple[int, int], list[int]]:
    """The samples of each batch, as the last group has trained it; ranks without samples take one of another's."""
    found: dict[tuple[int, int], dict[str, tuple[int, list[int]]]] = {}
    for _, group, what, rest, who in lines(folder):
        if what == "batch":
            found.setdefault((rest[0], rest[1]), {})[who] = group, rest[2]
    last = {place: max(group for group, _ in told.values()) for place, told in found.items()}
    return {
        place: sorted({number for group, ids in told.values() if group == last[place] for number in ids})
        for place, told in found.items()
    }


def points(run_dir: Path) -> list[tuple[str, int, float]]:
    """The points of TensorBoard, each as often as it is there."""
    return sorted(
        (value.tag, event.step, value.simple_value)
        for file in run_dir.rglob("events.out.tfevents.*")
        for event in LegacyEventFileLoader(str(file)).Load()
        for value in event.summary.value
        if value.WhichOneof("value") == "simple_value" and not value.tag.startswith(TIMES)
    )


TIMES = ("speed/", "device/", "balance/")


def difference(whole: Path, folder: Path) -> str:
    """Say how a disturbed run differs from an undisturbed one; empty if it does not."""
    expected, actual = batches(whole), batches(folder)
    if expected != actual:
        places = sorted(set(expected) ^ set(actual)) or [key for key in expected if expected[key] != actual[key]]
        return f"batch {places[0]}: {expected.get(places[0])} and {actual.get(places[0])}"
    ends = [sorted(one.rglob("last.ckpt")) for one in (whole, folder)]
    if not all(ends):
        return "no last.ckpt"
    states = [torch.load(found[-1], weights_only=True) for found in ends]
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
        if found := unequal(states[0][key], states[1][key], key):
            return f"last.ckpt: {found}"
    rows = [read_rows(one) for one in (whole, folder)]
    if found := unequal(rows[0], rows[1], "metrics.csv", 1e-9):
        return found
    return unequal(points(whole), points(folder), "TensorBoard", 1e-6)


def read_rows(folder: Path) -> list[dict[str, float]]:
    found = list(folder.rglob("metrics.csv"))
    with found[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        kept
        for row in rows
        if (kept := {k: float(v) for k, v in row.items() if v and not k.startswith(TIMES)}).keys() - {"epoch", "step"}
    ]


def unequal(a: Any, b: Any, where: str, tolerance: float = 1e-10) -> str:
    """The first place where two nested values differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return f"{where}: keys {sorted(map(str, a.keys() ^ b.keys()))}"
        return next((found for key in a if (found := unequal(a[key], b[key], f"{where}.{key}", tolerance))), "")
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        both = zip(a, b, strict=False)
        found = next((one for i, (x, y) in enumerate(both) if (one := unequal(x, y, f"{where}[{i}]", tolerance))), "")
        return found or ("" if len(a) == len(b) else f"{where}: {len(a)} and {len(b)} entries")
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.shape == b.shape and bool((a.double() - b.double()).abs().max() <= tolerance if a.numel() else True)
        return "" if same else f"{where}: {a.flatten()[:2].tolist()} and {b.flatten()[:2].tolist()}"
    if isinstance(a, float) and isinstance(b, float | int):
        return "" if a == b or abs(a - b) <= tolerance or (a != a and b != b) else f"{where}: {a} and {b}"
    return "" if a == b else f"{where}: {a} and {b}"


def recoveries(folder: Path) -> list[float]:
    """Seconds from each failure to the first hook of a later group, or of a later process."""
    fired = [float(path.read_text()) for path in folder.glob("fired-?*") if path.suffix == ""]
    told = lines(folder)
    firsts: dict[tuple[int, str], float] = {}
    for told_s, group, _, _, who in told:
        firsts.setdefault((group, "" if group else who), told_s)
    began = sorted(firsts.values())
    return [min((began_s - end_s for began_s in began if began_s > end_s), default=0.0) for end_s in sorted(fired)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--per-run", type=int, default=3, help="failures in a run, at most ranks - 1")
    parser.add_argument("--restarts", type=int, default=0, help="start all ranks anew, so often, instead of going on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause-s", type=float, default=0.01, help="mean seconds that a step waits")
    parser.add_argument("--cost", type=int, default=0, help="instead, interleaved runs without failures, so many each")
    parser.add_argument("--doubles", type=float, default=0.2, help="of failures, those within 0.2 s of another")
    parser.add_argument("--only", type=int, nargs="*", help="the numbers of the runs to do, of all that are drawn")
    parser.add_argument("--plan", nargs="*", help="the kills of each run, instead of drawn ones: point:times:rank")
    parser.add_argument("--keep", action="store_true", help="keep the folder")
    given = parser.parse_args()
    torch.set_num_threads(1)
    become_reaper()
    home = Path(tempfile.mkdtemp(prefix="goodput-"))
    sys.exit((cost if given.cost else fail)(given, home))


def fail(given: Any, home: Path) -> int:
    dice, done, bad, number = random.Random(given.seed), 0, 0, 0
    seconds: list[float] = []
    wholes_s = disturbed_s = 0.0
    at: Counter[str] = Counter()
    while done < given.kills:
        number += 1
        options = drawn_options(dice)
        plan = drawn_plan(given.ranks, min(given.per_run, given.kills - done), dice, given.doubles)
        if given.plan:
            plan = [
                {"number": i, "rank": int(rank), "point": point, "times": int(times), "delay_s": 0.0, "signal": KILL}
                for i, (point, times, rank) in enumerate(one.split(":") for one in given.plan)
            ]
        if given.only and number not in given.only:
            done += len(plan)
            continue
        whole, folder = home / f"{number}-whole", home / f"{number}"
        for one in (whole, folder):
            one.mkdir()
        (folder / "plan.json").write_text(json.dumps(plan))
        survives = not given.restarts
        status, took_s = run(whole, words(whole, options, given.ranks, False, 0, given.pause_s))
        problem = "" if status == 0 else f"undisturbed: status {status}"
        wholes_s += took_s
        disturbed = words(folder, options, given.ranks, survives, given.restarts, given.pause_s)
        status, took_s = run(folder, disturbed)
        disturbed_s += took_s
        problem = problem or ("" if status == 0 else f"status {status}")
        problem = problem or difference(whole, folder)
        fired = [one for one in plan if (folder / f"fired-{one['number']}").exists()]
        done += max(len(fired), 1)
        at.update(("freeze at " if one["signal"] == STOP else "") + one["point"] for one in fired)
        found = recoveries(folder)
        seconds += found
        bad += bool(problem)
        told = ", ".join(f"{one['point']} {one['times']} of rank {one['rank']}" for one in fired)
        print(f"run {number}: {told}: {' '.join(f'{s:.2f}' for s in found)} s {problem}", flush=True)
        if problem:
            print(f"  {options} {plan} {folder}", flush=True)
        elif not given.keep:
            shutil.rmtree(whole)
            shutil.rmtree(folder)
    seconds.sort()
    rows = {
        "runs": number, "failures": sum(at.values()), "runs that differ": bad,
        "recovery, median, s": f"{statistics.median(seconds):.2f}",
        "recovery, 95 %, s": f"{seconds[int(0.95 * (len(seconds) - 1))]:.2f}",
        "recovery, worst, s": f"{seconds[-1]:.2f}",
        "whole command, undisturbed and disturbed, s": f"{wholes_s:.0f}, {disturbed_s:.0f}",
    }  # fmt: skip
    print("\n| | |\n|---|---:|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items()))
    print("\n" + ", ".join(f"{name}: {count}" for name, count in sorted(at.items())))
    return 1 if bad else 0


def cost(given: Any, home: Path) -> int:
    """Measure steps without failures, with and without survival, in turns."""
    options = {**drawn_options(random.Random(0)), "strategy": "ddp", "+module.num_workers": 0, "checkpoint": "best"}
    options |= {"trainer.accumulate_grad_batches": 1, "trainer.val_check_interval": 1.0, "+module.width": 256}
    steps: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * given.cost):
        survives, folder = number % 2 == 0, home / str(number)
        folder.mkdir()
        status, _ = run(folder, words(folder, options, given.ranks, survives, 0, given.pause_s))
        assert status == 0, (folder / "output").read_text()
        starts = [told_s for told_s, _, what, _, who in lines(folder) if what == "batch" and who.startswith("0-")]
        steps[survives] += [b - a for a, b in pairwise(starts[7:])]
    for survives, found in steps.items():
        found.sort()
        print(f"survive={survives}: median {1000 * statistics.median(found):.3f} ms of {len(found)} steps")
    shutil.rmtree(home)
    return 0


if __name__ == "__main__":
    main()
