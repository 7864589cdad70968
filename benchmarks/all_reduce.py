"""Measure what it costs to reduce small CPU tensors over ranks: gloo's all_reduce, and through rank 0.

    python benchmarks/all_reduce.py [--ranks 3 4 8] [--kilobytes 0.1 150 500]

Both ways run in turns in the same processes. The table shows the median processor time of a rank (its threads
included) and wall time of one reduction.
"""

import argparse
import os
import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from evener.strategies.distributed import reduction

WAYS = {"all_reduce": 0, "through rank 0": 2**40}
"""What each way takes for small: bytes."""


def measure(numel: int, rounds: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Median milliseconds of a reduction: of processor time, the mean over ranks, and of wall time."""
    times: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, limit in WAYS.items():
            reduction.SMALL_BYTES = limit
            dist.barrier()
            processor, wall = time.process_time(), time.perf_counter()
            for _ in range(repeats):
                reduction.all_reduce(torch.ones(numel))
            seconds = torch.tensor([time.process_time() - processor, time.perf_counter() - wall])
            dist.all_reduce(seconds)
            times[way].append((seconds / dist.get_world_size() / repeats * 1e3).tolist())
    return {way: tuple(map(statistics.median, zip(*found, strict=True))) for way, found in times.items()}


def run(rank: int, num_ranks: int, port: int, options: argparse.Namespace) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=300))
    for kilobytes in options.kilobytes:
        for way, (processor, wall) in measure(max(1, int(kilobytes * 250)), options.rounds, options.repeats).items():
            if rank == 0:
                print(f"{num_ranks} ranks {kilobytes:8g} KB {way:15s} {processor:7.3f} ms {wall:8.3f} ms", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[3, 4, 8])
    parser.add_argument("--kilobytes", type=float, nargs="+", default=[0.1, 150, 500])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    for num_ranks in options.ranks:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        torch.multiprocessing.spawn(run, (num_ranks, store.port, options), nprocs=num_ranks)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
