"""Check on this machine's GPUs what tests on CPUs can't show, and measure what has no meaning there.

    python benchmarks/gpu_check.py [--only NAME ...] [--table gpu_table.md] [--cpu]

Each check runs in a process of its own with a time limit, and prints one line. What the machine does not allow (too
few GPUs, no NCCL) is skipped by name. A table of all results ends the output. `--cpu` runs the short form, on CPUs
instead of GPUs: it shows that the program itself works, and nothing about GPUs.
"""

import argparse
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import (
    BalancedDataParallelStrategy,
    DataParallelStrategy,
    DDPModelParallelStrategy,
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from evener.trainer import Trainer, compose
from evener.trainer.checkpoint import Checkpoint
from evener.trainer.job.log_file import Interrupted, graceful_stop

# ------------------------------------------------------------------------------------------------------ what is trained

NUM_STEPS, BATCH, WIDTH = 24, 12, 32
LONG = 500
"""Steps of a run that is stopped."""
SMALL = 4
"""Steps of the short form are fewer by this factor where only time is measured."""


class Net(pl.LightningModule):
    """A small regression in float64, where sums in another order differ by less than 1e-9. Logs in several ways.

    Args:
        width: of its layers.
        depth: number of its layers.
        dtype: of its parameters.
    """

    def __init__(self, width: int = WIDTH, depth: int = 4, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
        self.net = nn.Sequential(*layers[:-1]).to(dtype)
        self.last_loss: Any = None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.last_loss = loss.detach()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("number", 0.5)
        self.log("largest", loss.detach(), reduce_fx="max", on_epoch=True)
        return {"loss": loss, "loss_weight": len(x)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def loader(num_batches: int, width: int = WIDTH, dtype: torch.dtype = torch.float64, size: int = BATCH) -> Any:
    """Batches of random samples; the last is ragged."""
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(2, num_batches * size - 1, width, generator=generator, dtype=dtype)
    return DataLoader(TensorDataset(x, y), batch_size=size, pin_memory=torch.cuda.is_available())


def fit(strategy: Any, devices: Sequence[str], module: pl.LightningModule | None = None, **options: Any) -> Any:
    """Train on devices (`cuda:0`); returns the trainer."""
    data = options.pop("data", None) or loader(NUM_STEPS)
    kind = "cuda" if devices[0].startswith("cuda") else "cpu"
    num = len(devices) if isinstance(strategy, DDPStrategy) else 1  # the others were given their devices
    given: dict[str, Any] = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "max_epochs": 1, "log_every_n_steps": 1000, "accelerator": kind, "devices": num, **options,
    }  # fmt: skip
    trainer = Trainer(strategy=strategy, **given)
    trainer.fit(module or Net(), data)
    return trainer


def weights(trainer: Any) -> Tensor:
    return torch.cat([parameter.detach().cpu().flatten() for parameter in trainer.lightning_module.parameters()])


def in_process(name: str, devices: Sequence[str]) -> Any:
    """A strategy of one process on devices that may repeat and mix."""
    of: dict[str, Callable[[], Any]] = {
        "single_device": lambda: SingleDeviceStrategy(devices[0]),
        "dp": lambda: DataParallelStrategy(devices),
        "balanced_dp": lambda: BalancedDataParallelStrategy(weights=range(1, len(devices) + 1), devices=devices),
        "model_parallel": lambda: ModelParallelStrategy(devices),
        "micro_batches": lambda: ModelParallelStrategy(devices, num_microbatches=3),
        "micro_batches_first": lambda: ModelParallelStrategy(devices, num_microbatches=3, output_device="first"),
    }
    return of[name]()


def ranks(name: str) -> Any:
    """A strategy of several processes, which the trainer starts."""
    of: dict[str, Callable[[], Any]] = {
        "ddp": lambda: DDPStrategy(batch_size_is="global", timeout_s=60),
        "ddp_of_replicas": lambda: DDPStrategy(batch_size_is="global", devices_per_process=2, timeout_s=60),
        "ddp_model_parallel": lambda: DDPModelParallelStrategy(batch_size_is="global", timeout_s=60),
    }
    return of[name]()


# -------------------------------------------------------------------------------------------------------------- checks


def parity(name: str, devices: list[str]) -> str:
    """The weights after an epoch equal those of one device."""
    strategy = ranks(name) if name.startswith("ddp") else in_process(name, devices)
    found = weights(fit(strategy, devices))
    expected = weights(fit(SingleDeviceStrategy(devices[0]), devices[:1]))
    difference = (found - expected).abs().max().item()
    assert difference < 1e-9, f"weights differ by {difference:.2g} from one device's"
    return f"largest difference {difference:.1g}"


class NoHostWaits(pl.Callback):
    """Makes torch raise in steps 5 to 20 where the host waits for a GPU."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._set(trainer, 5, "error")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._set(trainer, 20, "default")

    def _set(self, trainer: pl.Trainer, step: int, mode: str) -> None:
        if trainer.fit_loop.total_batch_idx == step and trainer.strategy.root_device.type == "cuda":
            torch.cuda.set_sync_debug_mode(mode)


def host_waits(name: str, devices: list[str]) -> str:
    """No call in steps 5 to 20 makes the host wait (law 3)."""
    strategy = ranks(name) if name.startswith("ddp") else in_process(name, devices)
    fit(strategy, devices, callbacks=[NoHostWaits()])
    return "none in steps 5 to 20"


class KeepsWeights(pl.Callback):
    """Copies the weights after every step, on their device."""

    def __init__(self) -> None:
        self.at: dict[int, Tensor] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.at[trainer.global_step] = torch.cat([p.detach().flatten() for p in pl_module.parameters()])


def checkpoint(devices: list[str]) -> str:
    """A checkpoint that is written while training goes on holds the weights of its step."""
    kept = KeepsWeights()
    with tempfile.TemporaryDirectory() as folder:
        saving = Checkpoint(dirpath=folder, every_n_steps=5, save_top_k=-1, background=True)
        fit(SingleDeviceStrategy(devices[0]), devices[:1], callbacks=[saving, kept], enable_checkpointing=True)
        files = sorted(Path(folder).glob("epoch*.ckpt"))
        for file in files:
            saved = torch.load(file, map_location="cpu", weights_only=True)
            own = torch.cat([value.flatten() for value in saved["state_dict"].values()])
            assert torch.equal(own, kept.at[saved["global_step"]].cpu()), f"{file.name} differs from its step's weights"
    assert len(files) >= 4, f"{len(files)} files were written"
    return f"{len(files)} files equal"


def plan_error(devices: list[str]) -> str:
    """The memory that `mode=plan` computes is near the measured peak."""
    from evener.trainer.cli.train import prepare
    from evener.trainer.plan.plan import plan_memory
    from evener.trainer.study.compare import run_trial, trial_config

    with tempfile.TemporaryDirectory() as folder:
        words = ["experiment=char_lm", "strategy=single_device", "accelerator=cuda", "devices=1", f"run_dir={folder}"]
        cfg = prepare(compose(words))
        planned = plan_memory(cfg)
        measured = run_trial(
            trial_config(cfg, planned.strategy, Path(folder) / "measured"), planned.strategy, cfg.compare.timeout_s
        )
    assert measured.peak_memory_mib, f"the peak could not be measured: {measured.reason}"
    error = planned.peak / (measured.peak_memory_mib[0] * 2**20) - 1
    assert abs(error) < 0.25, f"planned / measured - 1 is {error:+.0%}"
    return f"planned / measured - 1 is {error:+.0%}"


class Transformer(pl.LightningModule):
    """Two small layers, and as many callbacks of the module as `rich` asks for."""

    def __init__(self, rich: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
        self.net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.rich = rich

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        if self.rich:
            self.log_dict({"loss": loss, "half": loss.detach() / 2}, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        if not self.rich:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10)}}


class Clock(pl.Callback):
    """Seconds of the steps after a warm-up."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up, self.num, self.since, self.seconds = warm_up, 0, 0.0, 0.0

    def tick(self, device: torch.device, last: bool) -> None:
        self.num += 1
        if self.num == self.warm_up or last:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            self.since, self.seconds = time.perf_counter(), time.perf_counter() - self.since

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.tick(trainer.strategy.root_device, trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)

    def ms_per_step(self) -> float:
        return 1000 * self.seconds / (self.num - self.warm_up)


def step_overhead(devices: list[str], num_steps: int = 400) -> str:
    """Milliseconds per step of a small transformer: a hand-written loop, Evener, Lightning."""
    device = torch.device(devices[0])
    num_steps = num_steps if device.type == "cuda" else num_steps // SMALL // 2
    data = DataLoader(TensorDataset(torch.randn(num_steps * 8, 16, WIDTH)), 8, pin_memory=device.type == "cuda")

    def by_hand() -> float:
        module, clock = Transformer().to(device), Clock(num_steps // 4)
        optimizer = module.configure_optimizers()
        for i, (x,) in enumerate(data):
            optimizer.zero_grad()
            module.net(x.to(device, non_blocking=True)).square().mean().backward()
            optimizer.step()
            clock.tick(device, i == num_steps - 1)
        return clock.ms_per_step()

    def by(cls: type[pl.Trainer], rich: bool) -> float:
        with tempfile.TemporaryDirectory() as folder:
            clock = Clock(num_steps // 4)
            trainer = cls(
                accelerator=device.type, devices=1, max_epochs=1, callbacks=[clock], default_root_dir=folder,
                enable_model_summary=False, enable_progress_bar=rich, enable_checkpointing=rich, logger=rich,
            )  # fmt: skip
            trainer.fit(Transformer(rich), data)
        return clock.ms_per_step()

    base = by_hand()
    found = [f"by hand {base:.2f} ms"]
    for kind, rich in (("bare", False), ("rich", True)):
        own, other = by(Trainer, rich), by(pl.Trainer, rich)
        found.append(f"{kind}: evener {own / base:.2f} x, lightning {other / base:.2f} x")
    return "; ".join(found)


def stages_overlap(devices: list[str]) -> str:
    """Micro-batches on two GPUs take clearly less time than the whole batch."""
    width, size = 4096, 4096
    data = loader(12, width, torch.float32, size)

    def ms(num_microbatches: int) -> float:
        clock = Clock(4)
        module = Net(width, 8, torch.float32)
        fit(
            ModelParallelStrategy(devices, num_microbatches=num_microbatches),
            devices,
            module,
            data=data,
            callbacks=[clock],
        )
        return clock.ms_per_step()

    whole, parts = ms(1), ms(8)
    # 1.78 is the ideal, of which the late device reaches 0.94 where copies take as long as operations (docs/dev/gpu.md)
    assert whole / parts > 1.5, f"{whole:.0f} ms in one piece, {parts:.0f} ms in 8 micro-batches"
    return f"{whole:.0f} ms in one piece, {parts:.0f} ms in 8 micro-batches"


def root_memory(devices: list[str]) -> str:
    """Under dp the root holds its parameters, its gradients and one sum, whatever the number of GPUs."""
    width, depth = 4096, 8
    num_bytes = 4 * depth * width * (width + 1)

    def peak(num: int) -> float:
        torch.cuda.reset_peak_memory_stats(devices[0])
        module = Net(width, depth, torch.float32)
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
        fit(DataParallelStrategy(devices[:num]), devices[:num], module, data=loader(4, width, torch.float32, 4 * num))
        return torch.cuda.max_memory_allocated(devices[0]) / num_bytes

    peaks = [peak(num) for num in range(2, len(devices) + 1)]
    assert max(peaks) < 3.5, f"peaks in units of the parameters: {peaks}"
    assert max(peaks) - min(peaks) < 0.5, f"the peak grows with the number of GPUs: {peaks}"
    return "peak on the root: " + ", ".join(f"{value:.1f}" for value in peaks) + " x the parameters"


class Slow(Net):
    """Keeps rank 1's GPU busy; at step 8 rank 1 is killed, or rank 0 is asked to stop."""

    def __init__(self, kill: bool) -> None:
        super().__init__()
        self.kill = kill

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if self.global_rank == 1 and self.device.type == "cuda":
            torch.cuda._sleep(50_000_000)
        if batch_idx == 8 and self.kill and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if batch_idx == 8 and not self.kill and self.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def stop_together(devices: list[str]) -> str:
    """After a SIGTERM to one rank all stop at one step, though another rank's GPU is behind."""
    with tempfile.TemporaryDirectory() as folder:
        done = torchrun("stop", folder)
        steps = {path.name: int(path.read_text(encoding="utf-8")) for path in Path(folder).iterdir()}
    assert sorted(steps) == ["rank0", "rank1"], f"{steps}; {done[-1500:]}"
    assert len(set(steps.values())) == 1, f"ranks stopped at different steps: {steps}"
    assert 8 <= steps["rank0"] < LONG, f"ranks stopped at step {steps['rank0']}"
    return f"both at step {steps['rank0']}"


def torchrun(work: str, folder: str) -> str:
    """Run a work of `WORKS` on two ranks; returns what they said."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    done = subprocess.run([*words, "--work", work, "--folder", folder], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def work_until_stopped(folder: str) -> None:
    kind = "cuda" if torch.cuda.device_count() >= 2 else "cpu"
    trainer = Trainer(
        strategy=ranks("ddp"), accelerator=kind, devices=2, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    with suppress(Interrupted), graceful_stop(trainer):
        trainer.fit(Slow(kill=False), loader(LONG))
    Path(folder, f"rank{trainer.global_rank}").write_text(str(trainer.global_step), encoding="utf-8")


WORKS: dict[str, Callable[[str], None]] = {"stop": work_until_stopped}


def killed_rank(devices: list[str]) -> str:
    """A rank that is killed ends the run within a minute, and is named."""
    since = time.perf_counter()
    try:
        fit(ranks("ddp"), devices, Slow(kill=True))
    except Exception as exc:  # noqa: BLE001  # whatever the run ends with must name the rank
        said = str(exc)
    else:
        raise AssertionError("the run went on without rank 1")
    seconds = time.perf_counter() - since
    assert "rank 1" in said, f"the killed rank is not named: {said[-500:]}"
    assert seconds < 60, f"the run ended after {seconds:.0f} s"
    return f"named after {seconds:.0f} s"


# ------------------------------------------------------------------------------------------------------------- program


@dataclass(frozen=True)
class Check:
    """One check.

    Args:
        name: as it is printed, and given to `--only`.
        run: does it on devices, returns the result in words, raises if it fails.
        devices: indices of GPUs; -1 stands for the CPU.
        short: whether it belongs to the short form.
        limit_s: seconds after which its process is killed.
        nccl: whether it needs NCCL.
    """

    name: str
    run: Callable[[list[str]], str]
    devices: tuple[int, ...] = (0,)
    short: bool = True
    limit_s: float = 120.0
    nccl: bool = False

    @property
    def num_gpus(self) -> int:
        return max(self.devices) + 1


TWICE, MIXED, BOTH, FOUR = (0, 0), (0, -1), (0, 1), (0, 1, 2, 3)


def checks() -> list[Check]:
    """All checks, those for one GPU first."""
    places = {"single_device": (0,), "dp": TWICE, "balanced_dp": TWICE, "model_parallel": TWICE, "micro_batches": TWICE}
    one = [
        Check(f"host_waits.{name}", partial(host_waits, name), devices, short=name in ("dp", "micro_batches"))
        for name, devices in places.items()
    ]
    one.append(Check("host_waits.ddp", partial(host_waits, "ddp"), short=False, nccl=True))
    one.append(Check("parity.ddp.one_rank", partial(parity, "ddp"), short=False, nccl=True))
    for place, devices in (("twice", TWICE), ("mixed", MIXED)):
        for name in ("dp", "model_parallel", "micro_batches", "micro_batches_first"):
            one.append(Check(f"parity.{name}.{place}", partial(parity, name), devices, short=place == "twice"))
    one += [
        Check("checkpoint", checkpoint),
        Check("plan", plan_error, short=False, limit_s=300),
        Check("step_overhead", step_overhead, limit_s=600),
    ]
    two = [
        *(
            Check(f"{kind.__name__}.{name}.two", partial(kind, name), BOTH, short=name == "ddp", nccl=name == "ddp")
            for kind in (host_waits, parity)
            for name in ("dp", "balanced_dp", "model_parallel", "micro_batches", "micro_batches_first", "ddp")
        ),
        Check("stages_overlap", stages_overlap, BOTH, short=False, limit_s=300),
        Check("stop_together", stop_together, BOTH, short=False, nccl=True),
        Check("killed_rank", killed_rank, BOTH, nccl=True),
        Check("root_memory", root_memory, BOTH, short=False, limit_s=300),
    ]
    four = [
        Check("parity.ddp_model_parallel.2x2", partial(parity, "ddp_model_parallel"), FOUR, nccl=True),
        Check("parity.ddp_of_replicas.2x2", partial(parity, "ddp_of_replicas"), FOUR, short=False, nccl=True),
        Check("host_waits.ddp_model_parallel.2x2", partial(host_waits, "ddp_model_parallel"), FOUR, False, nccl=True),
        Check("root_memory.four", root_memory, FOUR, short=False, limit_s=300),
    ]
    return [*one, *two, *four]


def missing(check: Check, on_cpu: bool) -> str:
    """Why this machine does not allow a check; empty if it does."""
    if on_cpu:
        return "" if check.short else "not in the short form"
    num = torch.cuda.device_count()
    if num < check.num_gpus:
        return f"needs {check.num_gpus} GPUs, found {num}"
    return "needs NCCL" if check.nccl and not dist.is_nccl_available() else ""


def devices_of(check: Check, on_cpu: bool) -> list[str]:
    return ["cpu" if on_cpu or i < 0 else f"cuda:{i}" for i in check.devices]


def run_here(check: Check, on_cpu: bool, folder: str) -> None:
    """Run one check in this process, which was started for it; leave its result and its output in a folder."""
    os.setsid()  # so that what it starts can be ended with it
    with open(f"{folder}/output", "w", buffering=1, encoding="utf-8") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    try:
        found = {"verdict": "passed", "said": check.run(devices_of(check, on_cpu))}
    except Exception as exc:  # noqa: BLE001  # told by the parent
        traceback.print_exc()
        found = {"verdict": "failed", "said": f"{type(exc).__name__}: {exc}"}
    Path(folder, "result").write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for what a failed check has left


def run_apart(check: Check, on_cpu: bool) -> tuple[str, str]:
    """Run one check in a process of its own; returns its verdict and its result in words."""
    context: Any = multiprocessing.get_context("fork" if on_cpu else "spawn")  # CUDA can't be forked
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=run_here, args=(check, on_cpu, folder))
        process.start()
        process.join(check.limit_s)
        is_late = process.is_alive()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        process.join()
        output = Path(folder, "output").read_text(encoding="utf-8") if Path(folder, "output").exists() else ""
        result = Path(folder, "result")
        found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    ended = f"took longer than {check.limit_s:g} s" if is_late else f"ended with status {process.exitcode}"
    verdict = found.get("verdict", "failed")
    if verdict == "failed":
        print(output, file=sys.stderr)
    return verdict, " ".join(found.get("said", ended).split())[:300]


def table(rows: Sequence[tuple[str, str, str, float]]) -> str:
    """The results as a table of Markdown."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    head = f"torch {torch.__version__}, lightning {pl.__version__}, {', '.join(gpus) or 'no GPU'}"
    lines = [f"| {name} | {verdict} | {said} | {seconds:.0f} |" for name, verdict, said, seconds in rows]
    return "\n".join([head, "", "| check | verdict | result | seconds |", "|---|---|---|---|", *lines])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="names of checks, or beginnings of names")
    parser.add_argument("--table", type=Path, help="file for the table")
    parser.add_argument("--cpu", action="store_true", help="the short form, on CPUs")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        WORKS[options.work](options.folder)
        return 0
    torch.set_num_threads(1)
    rows: list[tuple[str, str, str, float]] = []
    for check in checks():
        if options.only and not check.name.startswith(tuple(options.only)):
            continue
        since = time.perf_counter()
        reason = missing(check, options.cpu)
        verdict, said = ("skipped", reason) if reason else run_apart(check, options.cpu)
        rows.append((check.name, verdict, said, time.perf_counter() - since))
        print(f"{verdict:8s} {check.name:36s} {said}", flush=True)
    print("\n" + table(rows))
    if options.table:
        options.table.write_text(table(rows) + "\n", encoding="utf-8")
    return int(any(verdict == "failed" for _, verdict, _, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
