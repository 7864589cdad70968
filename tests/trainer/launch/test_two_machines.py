"""Training across two machines with torchrun: two agents on this one, and two network namespaces joined by a cable."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from launching import Run, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ADDRESSES = ("10.77.0.1", "10.77.0.2")


def torchrun(node: int, address: str, prefix: list[str] | None = None, *options: str) -> list[str]:
    return [
        *(prefix or []), sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
        f"--node-rank={node}", f"--master-addr={address}", "--master-port=29517", *options,
    ]  # fmt: skip


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def hosts_are_possible() -> str:
    """Why network namespaces can't be made here; empty where they can."""
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    try:
        ip("netns", "add", "evener-probe")
    except subprocess.CalledProcessError as exc:
        return f"network namespaces need root: {exc.stderr.decode().strip()}"
    ip("netns", "del", "evener-probe")
    return ""


@contextmanager
def two_hosts() -> Generator[list[list[str]]]:
    """Two namespaces with a veth pair between them; gives the prefix that runs a command on each."""
    names = [f"evener-{os.getpid()}-{i}" for i in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ends = [f"ev{os.getpid() % 100000}a", f"ev{os.getpid() % 100000}b"]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def wait_both(runs: list[Run], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for run in runs:
        assert run.wait(max(1.0, deadline - time.monotonic())) == 0, "\n".join(r.output.read_text() for r in runs)


def start(
    stack: ExitStack, folder: Path, address: str, prefixes: list[list[str]], options: list[str], overrides: list[str]
) -> list[Run]:
    runs = []
    for node, prefix in enumerate(prefixes):
        own = folder / str(node)
        own.mkdir()
        words = ["num_nodes=2", f"log_dir={folder}/logs", f"++module.record={folder}/record", *overrides]
        env = {"GLOO_SOCKET_IFNAME": _interface(prefix)} if prefix else {}
        command = torchrun(node, address, prefix, *options)
        runs.append(stack.enter_context(running(own, *words, command=command, env=env)))
        runs[-1].record = folder / "record"
    return runs


def _interface(prefix: list[str]) -> str:
    text = subprocess.run([*prefix, "ip", "-o", "link"], check=True, capture_output=True, text=True).stdout
    return next(line.split(": ")[1].split("@")[0] for line in text.splitlines() if ": ev" in line)


def test_two_agents_with_two_ranks_each_share_one_run_directory(tmp_path: Path) -> None:
    with ExitStack() as stack:
        runs = start(stack, tmp_path, "127.0.0.1", [[], []], [], ["trainer.max_epochs=1"])
        wait_both(runs, 150)
        steps = runs[0].lines()
    assert sorted({rank for rank, _, _ in steps}) == [0, 1, 2, 3]
    assert [step for rank, _, step in steps if rank == 3] == list(range(32))
    assert len(list(tmp_path.glob("logs/*/*/*"))) == 1
    assert len(list(tmp_path.glob("logs/*/*/*/.hydra"))) == 1
    assert len(list(tmp_path.glob("logs/**/result.json"))) == 1


def test_two_hosts_train_together_and_resume_after_a_worker_is_killed(tmp_path: Path) -> None:
    if reason := hosts_are_possible():
        pytest.skip(reason)
    with two_hosts() as prefixes, ExitStack() as stack:
        overrides = ["trainer.max_epochs=1", "++module.pause_s=0.1", "checkpoint=every_n_steps"]
        options = ["--max-restarts=2", "--monitor-interval=0.2"]
        runs = start(stack, tmp_path, ADDRESSES[0], prefixes, options, [*overrides, "checkpoint.every_n_steps=2"])
        runs[0].wait_for_step(5, timeout_s=300)
        on_second_host = next(pid for rank, pid, _ in runs[0].lines() if rank == 3)
        assert psutil.Process(on_second_host).is_running()
        os.kill(on_second_host, signal.SIGKILL)
        wait_both(runs, 200)
        steps = [step for rank, _, step in runs[0].lines() if rank == 0]
    restart = next(i for i in range(1, len(steps)) if steps[i] <= steps[i - 1])
    assert steps[restart] >= 4, "it went on from a checkpoint"
    assert steps[restart] % 2 == 0
    assert steps[restart:] == list(range(steps[restart], 32))
    assert len(list(tmp_path.glob("logs/*/*/*"))) == 1
