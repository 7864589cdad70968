"""Run a framework's training in processes of its own, with a time limit."""

import atexit
import ctypes
import importlib
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .problem import Problem, Run

FRAMEWORKS = {
    # name: module of this folder, function, package whose version counts
    "by hand": ("by_hand", "train", "torch"),
    "evener": ("lightning_like", "train_evener", "evener"),
    "lightning": ("lightning_like", "train_lightning", "pytorch_lightning"),
    "accelerate": ("accelerate_loop", "train", "accelerate"),
    "transformers": ("hf_trainer", "train", "transformers"),
    "ignite": ("ignite_engine", "train", "ignite"),
}
LEFT_S = 20.0
"""Seconds that the other ranks have to end after one has failed."""


def installed() -> list[str]:
    """Names of the frameworks that can be run here."""
    return [name for name, (_, _, package) in FRAMEWORKS.items() if find_spec(package)]


def load(framework: str) -> Any:
    """The function that trains with a framework; imports it, so that attempts in forked processes begin at once."""
    module, function, _ = FRAMEWORKS[framework]
    return getattr(importlib.import_module(f"frameworks.{module}"), function)


@dataclass
class Attempt:
    """What came of an attempt.

    Args:
        outcomes: of each rank (`Run.end`); empty unless all have ended well.
        error: the first sentence of what ended it, if anything did.
        hung: whether it took longer than it may.
        output: what its processes wrote.
    """

    outcomes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    error: str = ""
    hung: bool = False
    output: str = ""


def attempt(framework: str, problem: Problem, folder: Path, kill_after: int = 0, limit_s: float = 60.0) -> Attempt:
    """Train a problem with a framework, from the newest checkpoint in a folder, if there is one."""
    train = load(framework)
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    results = [folder / f"result{rank}" for rank in range(problem.ranks)]
    for file in results:
        file.unlink(missing_ok=True)
    pids = [_start(train, Run(problem, folder, kill_after), rank, port) for rank in range(problem.ranks)]
    hung = not _wait(pids, limit_s)
    found_results = [torch.load(file, weights_only=False) if file.exists() else {} for file in results]
    errors = sorted((r["at"], r["error"]) for r in found_results if "error" in r)
    output = "".join((folder / f"output{rank}").read_text(errors="replace") for rank in range(problem.ranks))
    whole = all("weights" in result for result in found_results)
    return Attempt(found_results if whole else [], errors[0][1] if errors else "", hung, output)


def end_with_parent() -> None:
    """Have Linux end this process when its parent ends, which a session of its own would outlive."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _start(train: Any, run: Run, rank: int, port: int) -> int:
    if pid := os.fork():
        return pid
    try:
        os.setsid()
        end_with_parent()
        output = os.open(run.folder / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(run.folder)
        if run.problem.ranks > 1:  # as torchrun does
            size = str(run.problem.ranks)
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "WORLD_SIZE": size,
                "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "benchmark",
            }  # fmt: skip
            run.rank = rank
        torch.set_num_threads(1)
        torch.set_default_dtype(run.problem.dtype)
        warnings.simplefilter("default")
        result = _result(train, run)
        torch.save(result, run.folder / f"result{rank}")
        atexit._run_exitfuncs()  # as at the end of a script
    except BaseException:  # noqa: BLE001  # the end of this process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _result(train: Any, run: Run) -> dict[str, Any]:
    try:
        train(run)
    except Exception as exc:  # noqa: BLE001  # told by the parent
        traceback.print_exc()
        return {"error": f"{type(exc).__name__}: {exc}", "at": time.time()}
    return run.outcome


def _wait(pids: list[int], limit_s: float) -> bool:
    """Wait until all have ended; end them, and what they have started, where that takes too long."""
    left, deadline = set(pids), time.monotonic() + limit_s
    while left and time.monotonic() < deadline:
        for pid in sorted(left):
            if os.waitpid(pid, os.WNOHANG)[0]:
                left.discard(pid)
                deadline = min(deadline, time.monotonic() + LEFT_S)
        time.sleep(0.01)
    for pid in pids:
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    for pid in sorted(left):
        os.waitpid(pid, 0)
    return not left
