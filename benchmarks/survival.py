"""Kill, freeze, stop and damage at random, and count what was not survived.

    python benchmarks/survival.py --kills 300 --commands 20 --files 1000 --jobs 2 --seed 0

Each run is drawn from the seed: strategy, loaders, optimizers, schedulers, callbacks, when checkpoints are saved. It is
done once undisturbed, and once more while the script or command, a rank, its group, or all processes are killed, frozen
or asked to stop (in a terminal, by Ctrl-C or its end), or its data workers hang, in some phase, and each time resumed
as a user would. Most runs are plain scripts, forked from this process; `--commands` are `train.py`, with and without
restarts of failed workers. Linux only.

| counted | |
|---|---|
| different | a disturbed run saw other samples or losses, or ended with another last.ckpt or metrics.csv |
| lost | a resumed run began before the newest checkpoint that was due, or before a graceful stop |
| hung | a run did not end in `--end-s` seconds after it was disturbed |
| orphans | processes that were alive 15 s after their script or command had ended (data workers look every 5 s) |
| failed | an undisturbed, a resumed or a thawed run ended with an error |

`--sabotage` gives the runs a defect, to prove that it is found.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from survival_files import ACCEPTED, damage_files
from survival_processes import Terminal, all_have_ended, become_reaper, descendants, end_all, has_ended, wait_for_end
from survival_runs import NUM_EPOCHS, Life, Run, difference, draw, lives, saved_batches, start

LEAVE_S = 15.0
"""Seconds that data workers of a killed process have to notice: torch's look every 5."""
PHASES = [*["step"] * 4, "begin", "start", "validation", "save", "epoch end", "end"]
ACTS = [*["kill"] * 7, "freeze", "thaw", "hang", "stop", "stop", "stop"]
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
MAIN, GROUP, ALL = "script", "group", "all"
"""The process that the user started, its group, and all of its processes; other targets are ranks."""
BAD = ("different", "lost", "hung", "orphans", "failed")
MOST_BAD = 10
"""Defects after which a job gives up."""


@dataclass
class Disturbance:
    """What is done to a run, and when: once `target` has been in `phase` so often, and a moment later."""

    act: str
    target: Any
    phase: str
    times: int
    delay_s: float
    signum: int

    def __str__(self) -> str:
        name = signal.Signals(self.signum).name
        return f"{self.act} ({name}) {self.target} {1000 * self.delay_s:.0f} ms after {self.phase} {self.times}"

    @classmethod
    def drawn(cls, run: Run, dice: random.Random) -> "Disturbance":
        act, phase = dice.choice(ACTS), dice.choice(PHASES)
        ranks = list(range(run.num_ranks))
        target = dice.choice([MAIN, GROUP if act == "stop" else MAIN, ALL, *ranks, *ranks])
        if act == "hang" and not (run.loader.get("num_workers") and run.loader["dataset"] == "map"):
            act = "kill"
        if act in ("freeze", "thaw", "hang") and target in (MAIN, ALL):
            target = dice.choice(ranks)
        if act == "freeze" and run.num_ranks == 1:
            act = "thaw"  # nobody is there to notice
        if (phase == "begin" and target not in (MAIN, ALL)) or act == "hang":
            phase = "start"
        times = dice.randint(1, 12) if phase == "step" else dice.randint(1, 3) if phase in ("save", "validation") else 1
        delay_s = dice.random() * ((6.0 if run.command else 0.2) if phase == "begin" else 0.03)
        signum = {"kill": signal.SIGKILL, "stop": dice.choice(STOPS)}.get(act, signal.SIGSTOP)
        return cls(act, target, phase, times, delay_s, signum)


class Trial:
    """One run: undisturbed, then disturbed.

    Args:
        run: what is trained.
        home: folder of both.
        dice: where disturbances come from.
        end_s: seconds after which a run that should end counts as hung.
    """

    def __init__(self, run: Run, home: Path, dice: random.Random, end_s: float) -> None:
        self.run, self.dice, self.end_s = run, dice, end_s
        self.whole, self.folder = home / "whole", home / "disturbed"
        self.counts: Counter[str] = Counter()
        self.num_attempts = 0
        self.history: list[str] = []
        self.known: dict[int, list[Any]] = {}
        self.reached = dict.fromkeys(range(run.num_ranks), 0)
        self.saved = dict(self.reached)
        for folder in (self.whole, self.folder):
            folder.mkdir(parents=True)

    def survive(self, num_acts: int) -> None:
        """Disturb the run a number of times, let it end, and compare it with the undisturbed one."""
        if self._end(*start(self.run, self.whole, 0), self.whole, None) != 0:
            return
        for life in lives(self.whole):
            self.known[life.rank] = [batch[:2] for batch in life.batches]
        status: int | None = -1
        while status != 0 and self.num_attempts < num_acts + 8:
            status = self._attempt(num_acts)
            self.num_attempts += 1
            if status is None:
                return
        if found := difference(self.run, self.whole, self.folder):
            self._bad("different", found)
        else:
            self.counts["bitwise equal"] += 1

    def _attempt(self, num_acts: int) -> int | None:
        """Start the run where it is, disturb it, and wait for its end; None where it is not as it should be."""
        if self.run.sabotage == "lost":
            for path in self.folder.rglob("*.ckpt"):
                path.unlink()
        since_ns = time.time_ns()
        pid, terminal = start(self.run, self.folder, self.num_attempts)
        self.counts["resumes"] += self.num_attempts > 0
        what = None
        if self.counts["disturbances"] < num_acts:
            what = self._disturb(pid, terminal, Disturbance.drawn(self.run, self.dice), since_ns)
        self.history.append(f"attempt {self.num_attempts}: {what}")
        status = self._end(pid, terminal, self.folder, what)
        (self.folder / "hang").unlink(missing_ok=True)
        self.history[-1] += f", status {status}"
        self._review(what, lives(self.folder, since_ns))
        return None if status != 0 and (what is None or what.act == "thaw") else status

    def _disturb(self, pid: int, terminal: Terminal | None, what: Disturbance, since_ns: int) -> Disturbance | None:
        """Wait for the moment and act; None if the run ended before."""
        newest: dict[int, Life] = {}
        deadline = time.monotonic() + self.end_s
        while what.phase != "begin":
            newest = {life.rank: life for life in lives(self.folder, since_ns)}
            watched = newest.get(0 if what.target in (MAIN, GROUP, ALL) else what.target)
            if watched is not None and watched.count(what.phase) >= what.times and len(newest) == self.run.num_ranks:
                break
            if has_ended(pid) or time.monotonic() > deadline:
                return None
            time.sleep(0.003)
        time.sleep(what.delay_s)
        if has_ended(pid):
            return None
        rank_pid = newest[what.target].pid if what.target in newest else pid
        self._act(what, pid, rank_pid, terminal)
        self.counts.update(["disturbances", what.act, f"in {what.phase}"])
        return what

    def _act(self, what: Disturbance, pid: int, rank_pid: int, terminal: Terminal | None) -> None:
        if what.act == "hang":
            (self.folder / "hang").write_text(str(what.target))
            if self.run.num_ranks == 1:  # nobody is there to notice
                time.sleep(0.5)
                os.kill(pid, signal.SIGKILL)
            return
        if what.target == GROUP and terminal is not None and what.signum in (signal.SIGINT, signal.SIGHUP):
            (terminal.press_ctrl_c if what.signum == signal.SIGINT else terminal.close)()
            return
        for target in {MAIN: [pid], GROUP: [-pid], ALL: descendants()}.get(what.target, [rank_pid]):
            with suppress(ProcessLookupError):
                os.kill(target, what.signum)
                if what.act == "thaw":
                    time.sleep(1)
                    os.kill(target, signal.SIGCONT)

    def _end(self, pid: int, terminal: Terminal | None, folder: Path, what: Disturbance | None) -> int | None:
        """Wait for the end of an attempt, and of all that it has started."""
        status = wait_for_end(pid, self.end_s)
        if terminal is not None:
            terminal.close()
        if status is None:
            self._bad("hung", f"{what}: {end_all()}")
            return None
        all_have_ended(LEAVE_S)
        if left := end_all():
            self._bad("orphans", f"{what}: {left}", len(left))
        if status != 0 and (what is None or what.act == "thaw"):
            output = (folder / f"output{self.num_attempts}").read_text()
            self._bad("failed", f"{what}: status {status}\n{output[-3000:]}")
        return status

    def _review(self, what: Disturbance | None, seen: list[Life]) -> None:
        """Verify where an attempt has begun, and note what it must have saved."""
        for life in (life for life in seen if life.batches and life.batches[0][:2] in self.known[life.rank]):
            rank, first = life.rank, self.known[life.rank].index(life.batches[0][:2])
            if first < self.saved[rank]:
                self._bad("lost", f"attempt {self.num_attempts}: batch {first}, not {self.saved[rank]}, before {what}")
            self.reached[rank] = max(self.reached[rank], first + len(life.batches))
            done = saved_batches(self.run, self.reached[rank] - 1, len(self.known[rank]) // NUM_EPOCHS)
            if what is not None and what.act == "stop":  # what was just trained is saved
                done = max(done, first + len(life.batches))
            self.saved[rank] = max(self.saved[rank], done)

    def _bad(self, kind: str, text: str, number: int = 1) -> None:
        self.counts[kind] += number
        print(f"{kind.upper()} {self.run}: {text} ({self.folder})", *self.history, sep="\n    ", flush=True)


def survive_share(given: argparse.Namespace, home: Path, job: int) -> Counter[str]:
    """Do one job's share of all runs."""
    become_reaper()
    dice, counts = random.Random(f"{given.seed}/{job}"), Counter[str]()
    for number, command in ((given.kills, False), (given.commands, True)):
        left = number // given.jobs + (job < number % given.jobs)
        while left > 0 and sum(counts[name] for name in BAD) < MOST_BAD:
            trial = Trial(draw(dice, command, given.sabotage), home / f"{job}-{counts['runs']}", dice, given.end_s)
            trial.survive(given.per_run)
            left -= trial.counts["kill"]
            counts += trial.counts + Counter(runs=1)
            if not any(trial.counts[name] for name in BAD):
                shutil.rmtree(trial.whole.parent)
    return counts


def in_jobs(given: argparse.Namespace, home: Path) -> Counter[str]:
    """Do the shares in processes side by side; each is the reaper of its own runs."""
    pids: list[int] = []
    for job in range(given.jobs):
        if (pid := os.fork()) == 0:
            status = 1
            try:
                (home / f"counts{job}").write_text(json.dumps(survive_share(given, home, job)))
                status = 0
            except BaseException:  # noqa: BLE001  # the end of this process
                traceback.print_exc()
            finally:
                os._exit(status)
        pids.append(pid)
    counts = Counter[str]()
    for job, pid in enumerate(pids):
        if os.waitpid(pid, 0)[1] != 0:
            raise SystemExit(f"job {job} has failed")
        counts += Counter(json.loads((home / f"counts{job}").read_text()))
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="kills of plain scripts; other disturbances come on top")
    parser.add_argument(
        "--commands", type=int, default=20, help="disturbances of train.py, which takes longer to start"
    )
    parser.add_argument("--files", type=int, default=1000, help="damaged files")
    parser.add_argument("--per-run", type=int, default=6, help="disturbances of one run")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--end-s", type=float, default=90.0, help="seconds after which a run counts as hung")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sabotage", default="", choices=["different", "lost", "hung", "orphans"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    home, since_s = Path(tempfile.mkdtemp(prefix="survival-")), time.monotonic()
    counts = in_jobs(given, home)
    files = damage_files(home / "files", given.files, random.Random(given.seed))
    print(f"{', '.join(f'{number} {name}' for name, number in sorted(counts.items()) if name.startswith('in '))}")
    print(f"{time.monotonic() - since_s:.0f} s, torch {torch.__version__}, {os.cpu_count()} cores\n\n| | |\n|---|---:|")
    names = ("runs", "disturbances", "kill", "freeze", "thaw", "hang", "stop", "resumes", "bitwise equal", *BAD)
    for name, number in [*((name, counts[name]) for name in names), *files.items()]:
        print(f"| {name} | {number} |")
    bad = sum(counts[name] for name in BAD) + sum(files[name] for name in ACCEPTED)
    if bad:
        print(f"\nkept: {home}")
    else:
        shutil.rmtree(home)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
