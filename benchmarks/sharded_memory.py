"""Peak memory of each process for a module of equal layers, under one device, ddp and fsdp, on the CPU.

    python benchmarks/sharded_memory.py --strategies single_device ddp fsdp --ranks 1 2 3
    python benchmarks/sharded_memory.py --strategies single_device fsdp --ranks 1 2 3 --limit_mib 740

The table has mebibytes above what the process had before training, and the ideal: weights, gradients and AdamW's state
over the number of ranks, and one layer with its gradient. With `--limit_mib` a process may map no more than that
(`ulimit -v`, counted from the start of training), and one that needs more is a row, too.
"""

import argparse
import multiprocessing
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import STRATEGIES
from evener.trainer import Trainer

MIB = 1 << 20
NAMES = {"single_device": {}, "ddp": {"batch_size_is": "global"}, "fsdp": {"batch_size_is": "global"}}


class Layers(pl.LightningModule):
    """Linear layers of equal size, built in `configure_model`."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.width, self.depth = width, depth
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(*(nn.Linear(self.width, self.width, bias=False) for _ in range(self.depth)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.net is not None
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def memory_mib(key: str) -> float:
    """A line of /proc/self/status: `VmRSS` is the memory now, `VmHWM` its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:"))


def train(name: str, rank: int, num_ranks: int, port: int, args: argparse.Namespace, queue: Any) -> None:
    """Train a few steps in this process and report its peak memory."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    environment |= {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "memory"}
    if num_ranks > 1:
        os.environ.update({key: str(value) for key, value in environment.items()})
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    torch.set_num_threads(1)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    before = memory_mib("VmRSS")
    if args.limit_mib is not None:
        limit = int((memory_mib("VmSize") + args.limit_mib) * MIB)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        pl.seed_everything(0, verbose=False)
        strategy = STRATEGIES[name](**NAMES[name])
        trainer = Trainer(
            strategy=strategy, accelerator="cpu", devices=num_ranks, max_steps=3, enable_model_summary=False, **quiet
        )
        trainer.fit(Layers(args.width, args.depth), DataLoader(TensorDataset(torch.randn(12, args.width)), 4))
        queue.put((rank, f"{memory_mib('VmHWM') - before:.0f} MiB"))
    except (MemoryError, RuntimeError) as exc:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        queue.put((rank, f"failed: {str(exc).splitlines()[0][:70]}"))
        queue.close()
        queue.join_thread()
        os._exit(1)


def row(name: str, num_ranks: int, args: argparse.Namespace) -> Sequence[str]:
    """Train with a strategy and describe the peak memory of its processes."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        context.Process(target=train, args=(name, rank, num_ranks, store.port, args, queue))
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    found = dict(queue.get(timeout=args.timeout_s) for _ in ranks)
    for process in ranks:
        process.join()
    layer = args.width**2 * 4 / MIB
    over = num_ranks if name == "fsdp" else 1
    ideal = 4 * layer * args.depth / over + 2 * layer * (over > 1)
    return name, str(num_ranks), f"{ideal:.0f}", ", ".join(found[rank] for rank in sorted(found))


def main() -> None:
    """Print one row per strategy and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 3], help="numbers of ranks; 1 for one device")
    parser.add_argument("--width", type=int, default=1024, help="features of each layer")
    parser.add_argument("--depth", type=int, default=48, help="number of layers")
    parser.add_argument("--limit_mib", type=float, help="mebibytes that each process may map from then on")
    parser.add_argument("--timeout_s", type=float, default=300)
    args = parser.parse_args()
    # freed tensors go back to the system at once, so that the peak is that of tensors in use
    os.environ.update(MALLOC_MMAP_THRESHOLD_=str(MIB), MALLOC_ARENA_MAX="1")
    print("| strategy | ranks | ideal MiB | peak of each process |\n|---|---|---|---|")
    for name in args.strategies:
        for num_ranks in args.ranks:
            if (num_ranks == 1) == (name == "single_device"):
                print("| " + " | ".join(row(name, num_ranks, args)) + " |")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
