"""Measure what many ranks cost the store that they share: light clients stand for ranks, without torch's groups.

Each client sends heartbeats, listens for requests to stop, and meets the others at barriers, with the code of ranks.
One process hosts the store and does nothing else, so that its processor time is the store's.

    python benchmarks/many_ranks.py --ranks 64 256 1024
"""

import argparse
import multiprocessing
import resource
import threading
import time
from datetime import timedelta
from itertools import pairwise
from typing import Any

import psutil
import torch
from torch.distributed import PrefixStore, TCPStore

from evener.strategies.distributed._watch import HeartbeatMonitor, StopAgreement
from evener.strategies.distributed.store import meet

CONTEXT = multiprocessing.get_context("forkserver")  # torch's threads do not survive a fork of this process
CONTEXT.set_forkserver_preload(["torch", "evener.strategies.distributed._watch"])
TIMEOUT_S = 300.0


def host(ready: Any) -> None:
    """Host the store until the end."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ready.send(store.port)
    time.sleep(3600)


class Client:
    """One rank's part of the machinery."""

    def __init__(self, port: int, rank: int, num_ranks: int) -> None:
        timeout = timedelta(seconds=TIMEOUT_S)
        self.store = PrefixStore("run", TCPStore("127.0.0.1", port, None, False, timeout, wait_for_workers=False))
        self.heartbeat = HeartbeatMonitor(StopAgreement(rank, num_ranks, self.store, TIMEOUT_S))
        self._rank, self._num_ranks = rank, num_ranks

    def meet(self, place: str) -> None:
        """Wait for the other ranks, as a barrier does."""
        meet(self.store, place, self._rank, self._num_ranks, "", TIMEOUT_S)


def clients(port: int, ranks: range, num_ranks: int, steps: Any, told: Any) -> None:
    """Be several ranks: go through the phases of the measurement with the other processes."""
    torch.set_num_threads(1)
    own = [Client(port, rank, num_ranks) for rank in ranks]
    steps.wait()  # connected
    for client in own:
        client.heartbeat.start()
    steps.wait()  # the hosts' time is read between these
    steps.wait()
    for number in range(3):
        steps.wait()
        started = time.perf_counter()
        threads = [threading.Thread(target=client.meet, args=(f"place {number}",)) for client in own]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        told.put(time.perf_counter() - started)
    steps.wait()
    if num_ranks - 1 in ranks:  # the last rank dies
        own[-1].heartbeat.end()
    steps.wait()
    if 0 in ranks:
        started = time.perf_counter()
        said = own[0].heartbeat.culprits()
        told.put((time.perf_counter() - started, said))
    steps.wait()


def measure(num_ranks: int, num_processes: int, seconds: float) -> dict[str, float]:
    """Measure one number of ranks."""
    reader, writer = CONTEXT.Pipe(duplex=False)
    server = CONTEXT.Process(target=host, args=(writer,), daemon=True)
    server.start()
    port = reader.recv()
    steps, told = CONTEXT.Barrier(num_processes + 1), CONTEXT.Queue()
    bounds = [num_ranks * i // num_processes for i in range(num_processes + 1)]
    parts = [range(first, last) for first, last in pairwise(bounds)]
    workers = [
        CONTEXT.Process(target=clients, args=(port, part, num_ranks, steps, told), daemon=True) for part in parts
    ]
    for worker in workers:
        worker.start()
    steps.wait()
    steps.wait()
    time.sleep(2)
    process = psutil.Process(server.pid)
    share = cpu_share(process, seconds)
    steps.wait()
    times = []
    for _ in range(3):
        before = sum(process.cpu_times()[:2])
        steps.wait()
        times.append((max(told.get() for _ in parts), sum(process.cpu_times()[:2]) - before))
    steps.wait()
    time.sleep(0.5)
    steps.wait()
    notice_s, said = told.get()
    assert f"rank {num_ranks - 1} is gone" in said, said
    steps.wait()
    for child in (*workers, server):
        child.kill()
        child.join()
    barrier_s, barrier_host_s = sorted(times)[1]
    return {"host": share, "barrier_s": barrier_s, "barrier_host_s": barrier_host_s, "notice_s": notice_s}


def cpu_share(process: psutil.Process, seconds: float) -> float:
    """Processor share of a process, of one core."""
    before, started = sum(process.cpu_times()[:2]), time.perf_counter()
    time.sleep(seconds)
    return (sum(process.cpu_times()[:2]) - before) / (time.perf_counter() - started)


def main() -> None:
    """Measure, and print one line per number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--processes", type=int, default=8, help="that the clients are spread over")
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print("ranks | host, of a core | barrier, s | of it host, s | notice, s")
    for num_ranks in options.ranks:
        found = measure(num_ranks, options.processes, options.seconds)
        print(
            f"{num_ranks:5} | {found['host']:14.1%} | {found['barrier_s']:10.2f} | {found['barrier_host_s']:13.2f} | "
            f"{found['notice_s']:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
