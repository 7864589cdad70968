"""Run a function on n ranks, as torchrun would, with a hard timeout: `run_ranks(function, 2, arguments)`.

The ranks are forked from a server that has imported torch and Lightning once, so that a launch costs tenths of a
second. The rendezvous store lives in the test process: its port is never guessed, and it outlives every rank.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import fork_server
import psutil
import torch
from torch.distributed import TCPStore

KNOWN_WARNINGS = ("`isinstance.treespec", "GPU available but", "The '.*' does not have many", "The number of training",
                  r"self.log\('\w+', batch_size=\d+\)")  # fmt: skip
"""Those that pyproject.toml lets pass in the tests' own process."""


class RankError(AssertionError):
    """A rank raised, was killed, or did not finish in time; the message says which and where it was."""


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 300.0) -> list[Any]:
    """Run `function(*args)` in `num_ranks` processes that find the environment of torchrun.

    Args:
        function: a module-level function; it is pickled by name.
        num_ranks: number of processes, one node.
        args: its arguments, pickled.
        timeout_s: seconds after which the ranks and their data workers print their stacks, and are killed.

    Returns:
        What the function returned, by rank.

    Raises:
        RankError: a rank failed or did not finish; with the output of every failed rank.
    """
    return _well(run_ranks_unchecked(function, num_ranks, *args, timeout_s=timeout_s))


def run_ranks_unchecked(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 300.0
) -> list[Any]:
    """As `run_ranks`, with a `RankError` in the place of a failed rank's result, so that failures can be tested."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    envs = [torchrun_env(rank, num_ranks, store.port) for rank in range(num_ranks)]
    return _run(function, args, envs, timeout_s)


def run_script(function: Callable[..., Any], *args: Any, timeout_s: float = 100.0) -> Any:
    """Run `function(*args)` in a process of its own, as a plain script, which may start processes itself."""
    return _well(_run(function, args, [{"CUDA_VISIBLE_DEVICES": ""}], timeout_s))[0]


def _well(outcomes: list[Any]) -> list[Any]:
    failed = [f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes) if isinstance(outcome, RankError)]
    if failed:
        raise RankError("\n".join(failed))
    return outcomes


def _run(function: Callable[..., Any], args: Any, envs: list[dict[str, str]], timeout_s: float) -> list[Any]:
    """Run a function in a process for each environment."""
    with tempfile.TemporaryDirectory() as folder:
        processes: list[BaseProcess] = []
        for number, env in enumerate(envs):
            target = (function, args, env, f"{folder}/{number}")
            processes.append(fork_server.context().Process(target=_rank_main, args=target))
        for process in processes:
            process.start()
        _join(processes, timeout_s, folder)
        return [_outcome(process, Path(folder, str(number))) for number, process in enumerate(processes)]


def torchrun_env(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip


def _rank_main(function: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str], path: str) -> None:
    be_rank(env, f"{path}.out")
    faulthandler.register(signal.SIGUSR2, file=sys.stderr, all_threads=True)
    os.register_at_fork(after_in_child=partial(_own_stacks, path))
    warnings.simplefilter("error")
    for told in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", told)
    try:
        result = function(*args)
    except BaseException:
        traceback.print_exc()
        raise
    Path(f"{path}.tmp").write_bytes(pickle.dumps(result))
    os.replace(f"{path}.tmp", path)


def be_rank(env: dict[str, str], output: str) -> None:
    """Give this process a rank's environment, and a file for what it writes."""
    os.environ.update(env)
    with open(output, "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    torch.set_num_threads(1)
    # data workers start as in any rank: this process would hand on its own way, a server that imports torch anew
    multiprocessing.set_start_method(None, force=True)


def _own_stacks(path: str) -> None:
    """Give a forked data worker a file of its own: two stacks in one file mix, character by character."""
    faulthandler.register(signal.SIGUSR2, file=open(f"{path}.{os.getpid()}.out", "w"), all_threads=True)  # noqa: SIM115


def _join(ranks: list[BaseProcess], timeout_s: float, folder: str) -> None:
    deadline = time.monotonic() + timeout_s
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [process for process in ranks if process.is_alive()]
    for process in late:
        _print_stacks(process.pid or 0)
    before, deadline = -1, time.monotonic() + 20
    # until no output has grown for a second: the stacks of all threads have been written
    while late and (size := sum(path.stat().st_size for path in Path(folder).glob("*.out"))) != before:
        before = size
        if time.monotonic() > deadline:
            break
        time.sleep(1)
    for process in late:
        process.kill()
        process.join()


def _print_stacks(pid: int) -> None:
    """Let a rank write the stacks of its threads, and so its data workers, which are forked with its handler."""
    with suppress(psutil.NoSuchProcess):
        workers = psutil.Process(pid).children(recursive=True)
        os.kill(pid, signal.SIGUSR2)
        for worker in workers:
            worker.send_signal(signal.SIGUSR2)


def _outcome(process: BaseProcess, path: Path) -> Any:
    if path.exists():
        return pickle.loads(path.read_bytes())
    said = "".join(output.read_text() for output in sorted(path.parent.glob(f"{path.name}.*out")))
    return RankError(f"exit code {process.exitcode}\n{said}")
