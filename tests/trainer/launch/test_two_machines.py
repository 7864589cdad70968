"""Training across two machines with torchrun: two agents on this one, and two network namespaces joined by a cable."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import pytest
from launching import Run, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ADDRESSES = ("10.77.0.1", "10.77.0.2")


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


def _interface(prefix: list[str]) -> str:
    text = subprocess.run([*prefix, "ip", "-o", "link"], check=True, capture_output=True, text=True).stdout
    return next(line.split(": ")[1].split("@")[0] for line in text.splitlines() if ": ev" in line)


def start(stack: ExitStack, folder: Path, node: int, address: str, prefix: list[str]) -> Run:
    """Start torchrun on a machine, with two ranks."""
    (own := folder / str(node)).mkdir()
    command = [
        *prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
        f"--node-rank={node}", f"--master-addr={address}", "--master-port=29517", "--max-restarts=2",
        "--monitor-interval=0.2",
    ]  # fmt: skip
    words = [
        "num_nodes=2", f"log_dir={folder}/logs", f"++module.record={folder}/record", "trainer.max_epochs=1",
        "++module.pause_s=0.1", "checkpoint=every_n_steps", "checkpoint.every_n_steps=2",
    ]  # fmt: skip
    env = {"GLOO_SOCKET_IFNAME": _interface(prefix)} if prefix else {}
    run = stack.enter_context(running(own, *words, command=command, env=env))
    run.record = folder / "record"
    return run


@pytest.mark.parametrize("hosts", [False, True], ids=["two agents", "two hosts"])
def test_two_machines_train_together_and_resume_after_a_worker_is_killed(hosts: bool, tmp_path: Path) -> None:
    if hosts and (reason := hosts_are_possible()):
        pytest.skip(reason)
    with two_hosts() if hosts else nullcontext([[], []]) as prefixes, ExitStack() as stack:
        address = ADDRESSES[0] if hosts else "127.0.0.1"
        runs = [start(stack, tmp_path, node, address, prefix) for node, prefix in enumerate(prefixes)]
        runs[0].wait_for_step(5, timeout_s=300, num_ranks=4)
        on_second_host = next(pid for rank, pid, _ in runs[0].lines() if rank == 3)
        os.kill(on_second_host, signal.SIGKILL)
        for run in runs:
            assert run.wait(200) == 0, "\n".join(each.output.read_text() for each in runs)
        steps = [step for rank, _, step in runs[0].lines() if rank == 0]
    restart = next(i for i in range(1, len(steps)) if steps[i] <= steps[i - 1])
    assert steps[restart] >= 4, "it went on from a checkpoint"
    assert steps[restart] % 2 == 0
    assert steps[restart:] == list(range(steps[restart], 32))
    assert len(list(tmp_path.glob("logs/*/*/*"))) == 1
    assert len(list(tmp_path.glob("logs/*/*/*/.hydra"))) == len(list(tmp_path.glob("logs/**/result.json"))) == 1
