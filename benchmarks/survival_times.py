"""Measure the seconds from an event in a run of two ranks until all of its processes are gone.

    python benchmarks/survival_times.py --repeats 3

A rank raises, is killed, is frozen, hangs after the last collective, or the script or command gets a signal. Medians
for a plain script and for `train.py`, with `strategy.timeout_s=6`. Linux only.
"""

import argparse
import itertools
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from survival_processes import all_have_ended, become_reaper, end_all, wait_for_end
from survival_runs import TIMEOUT_S, Run, lives, start

END_S = 90.0
EVENTS: dict[str, tuple[str, Any, int]] = {
    # name: what the module does by itself, else whom (a rank, or the process that was started) gets which signal
    **{f"exception in rank {rank}": (f"raise {rank}", None, 0) for rank in (0, 1)},
    **{f"SIGKILL of rank {rank}": ("", rank, signal.SIGKILL) for rank in (0, 1)},
    **{f"freeze (SIGSTOP) of rank {rank}": ("", rank, signal.SIGSTOP) for rank in (0, 1)},
    **{f"hang of rank {rank} after the last collective": (f"hang {rank}", None, 0) for rank in (0, 1)},
    "SIGKILL of the script or command": ("", "main", signal.SIGKILL),
    **{s.name: ("", "main", s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)},
}


def measure(name: str, command: bool, folder: Path) -> tuple[float, int]:
    """Cause one event; return the seconds until all processes are gone, and the exit status."""
    sabotage, target, signum = EVENTS[name]
    run = Run(
        "ddp", {"dataset": "map"}, {}, ("every_n_steps", {"every_n_steps": 1}), {}, "none", command, pause_s=0.1,
        sabotage=sabotage,
    )  # fmt: skip
    folder.mkdir()
    pid, _ = start(run, folder, 0)
    try:
        if sabotage:
            since = _wait(_told_events(folder))
        else:
            pids = _wait(_pids_in_step(folder, 4))
            since = time.time()
            os.kill(pid if target == "main" else pids[target], signum)
        status = wait_for_end(pid, END_S)
        if status is None or not all_have_ended(END_S):
            raise SystemExit(f"{name}: still there after {END_S:g} s")
        return time.time() - since, status
    finally:
        end_all()


def _told_events(folder: Path) -> Iterator[float]:
    """When the module did what it was asked to, once it has."""
    while True:
        yield next((line[1] for life in lives(folder) for line in life.lines if line[0] == "event"), 0.0)


def _pids_in_step(folder: Path, step: int) -> Iterator[dict[int, int]]:
    """Processes by rank, once both are in a step."""
    while True:
        pids = {life.rank: life.pid for life in lives(folder) if life.count("step") >= step}
        yield pids if len(pids) == 2 else {}


def _wait(looks: Iterator[Any]) -> Any:
    deadline = time.monotonic() + END_S
    while not (found := next(looks)):
        if time.monotonic() > deadline:
            raise SystemExit(f"the event has not come within {END_S:g} s")
        time.sleep(0.005)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="part of an event's name")
    given = parser.parse_args()
    torch.set_num_threads(1)
    become_reaper()
    home, number = Path(tempfile.mkdtemp(prefix="survival-times-")), itertools.count()
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, timeout_s={TIMEOUT_S:g}, {given.repeats} repeats\n")
    print("| event | `train.py` | status | script | status |\n|---|---:|---:|---:|---:|", flush=True)
    for name in (name for name in EVENTS if given.only in name):
        cells: list[str] = []
        for command in (True, False):
            measured = [measure(name, command, home / str(next(number))) for i in range(given.repeats)]
            cells += [
                f"{statistics.median(seconds for seconds, _ in measured):.1f}",
                ", ".join(sorted({str(status) for _, status in measured})),
            ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    shutil.rmtree(home)


if __name__ == "__main__":
    sys.exit(main())
