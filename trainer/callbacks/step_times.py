"""Measure the time and operations of training steps, and peaks of memory."""

import copy
import logging
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.throughput import get_available_flops
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from ...strategies.batch.structure import num_samples
from ...strategies.core.devices import has_streams, peak_memory_bytes, precise_dtype
from ...strategies.core.module_checks import callbacks_of, has_nan, metrics_of
from ...strategies.core.module_log import log_nothing
from ...strategies.core.types import Batch
from ...strategies.registry import process_devices, processes_of, ranks_of
from .start_up import global_sizes

log = logging.getLogger(__name__)

MIB = 2**20


class RunSummary(pl.Callback):
    """Count training samples and training seconds, without validation: the one clock of a run, which others read.

    At every log point the loggers get means per optimizer step since the last one: `speed/samples_per_s` over all
    processes, and `speed/step_ms` and `speed/data_wait_ms` of rank 0, by the host's clock, without a synchronization.

    After `fit`, `samples_per_s`, `global_batch` (samples) and `peak_memory_mib` (per device) hold the figures over all
    processes, and `diverged` tells whether the weights contain nan.
    """

    def __init__(self) -> None:
        self.samples_per_s: float | None = None
        self.global_batch: int | None = None
        self.peak_memory_mib: list[float] = []
        self.diverged = False
        self.figures: dict[type, Callable[[dict[str, float]], dict[str, float]]] = {}
        """What other callbacks, by class, make of the means at a log point; it is logged with them."""
        self._num_samples = self._last_step = 0
        self._trained_s = 0.0
        self._since: float | None = None
        self._last = [0.0, 0.0, 0.0]

    @classmethod
    def of(cls, trainer: pl.Trainer) -> "RunSummary | None":
        """The trainer's; None if it has none."""
        return next((callback for callback in callbacks_of(trainer) if isinstance(callback, cls)), None)

    def pause(self, *_: Any, **__: Any) -> None:
        """Stop the clock, for anything that is not training."""
        if self._since is not None:
            self._trained_s += time.perf_counter() - self._since
            self._since = None

    def go(self, *_: Any, **__: Any) -> None:
        """Start the clock, or let it go on after a pause."""
        if self._since is None:
            self._since = time.perf_counter()

    def read(self, num_steps: int, data_wait_s: float = 0.0) -> dict[str, float]:
        """Read the means since the last reading, in as many steps: `samples_per_s`, `step_ms` and `data_wait_ms`."""
        running_s = 0.0 if self._since is None else time.perf_counter() - self._since
        now = [self._trained_s + running_s, data_wait_s, float(self._num_samples)]
        seconds, wait, samples = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        if seconds <= 0 or num_steps < 1:
            return {}
        per_step = {"step_ms": 1000 * seconds / num_steps, "data_wait_ms": 1000 * wait / num_steps}
        return {"samples_per_s": samples / seconds, **per_step}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # which may stem from an earlier run in this process, such as another job of a sweep
        for device in filter(has_streams, process_devices(trainer.strategy)):
            torch.accelerator.reset_peak_memory_stats(device)
        with suppress(OSError):  # the peak of the CPU, on Linux: proc_pid_clear_refs(5)
            Path("/proc/self/clear_refs").write_text("5")
        self._last_step = trainer.fit_loop.epoch_loop._batches_that_stepped

    on_train_epoch_start = go
    on_validation_start = pause

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        ranks = ranks_of(trainer.strategy)
        share = None if ranks is None else ranks.contract.shares.current
        # if the strategy does not define the samples of all processes, each is assumed to have as many
        total = int(share.total) if share else (num_samples(batch) or 0) * trainer.world_size
        self._num_samples += total
        self.global_batch = self.global_batch or total or None
        step = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        interval: int = getattr(trainer, "log_every_n_steps", 0)
        if interval and step % interval == 0 and step != self._last_step and trainer.loggers:
            self._log(trainer, step)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.go()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.pause()
        self.samples_per_s = self._num_samples / self._trained_s if self._num_samples and self._trained_s else None
        self.peak_memory_mib = gather_peak_memory_mib(trainer.strategy)  # a collective, after the last step

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # also of a run that was resumed after its end, and takes no step
        self.diverged = trainer.strategy.reduce_boolean_decision(has_nan(pl_module), all=False)

    def _log(self, trainer: pl.Trainer, step: int) -> None:
        """Log the means since the last log point; with accumulation, at the first batch of the step."""
        wait_s: float = getattr(trainer.fit_loop.epoch_loop, "data_wait_s", 0.0)
        times = self.read(step - self._last_step, wait_s)
        self._last_step = step
        if not times:
            return
        values = {f"speed/{name}": value for name, value in times.items() if wait_s or name != "data_wait_ms"}
        for figures in self.figures.values():
            values |= figures(times)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step - 1)


class DeviceMonitor(pl.Callback):
    """Log memory, batch share and time of every device of every process after each training epoch.

    Devices are numbered over all processes.

    - `device/peak_memory_mib_<i>`: on accelerators the memory of tensors (`torch.cuda.max_memory_allocated`), on the
      CPU the process's largest resident size, the same for all devices of a process.
    - `balance/share_<i>`: the device's fraction of a full batch, if batches are cut among devices. Strategies that
      measure devices log these during training, with `balance/time_s_<i>` and `balance/efficiency`.
    """

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        memory = gather_peak_memory_mib(trainer.strategy)
        values = {f"device/peak_memory_mib_{i}": value for i, value in enumerate(memory)}
        sizes, _ = global_sizes(trainer)  # empty, or one, if the batch is not cut
        if len(sizes) > 1 and not any(name.startswith("balance/") for name in trainer.logged_metrics):
            values |= {f"balance/share_{i}": size / sum(sizes) for i, size in enumerate(sizes)}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=max(0, trainer.fit_loop.epoch_loop._batches_that_stepped - 1))


def gather_peak_memory_mib(strategy: Strategy) -> list[float]:
    """Peak memory of every device of every process in MiB, in rank order; every rank must call it."""
    assert strategy.lightning_module is not None
    trainer, device = strategy.lightning_module.trainer, strategy.root_device
    measured = map(peak_memory_bytes, process_devices(strategy))  # None for the CPU
    values = [(peak_resident_bytes() if size is None else size) / MIB for size in measured]
    places = torch.zeros(trainer.world_size, len(values), dtype=precise_dtype(device), device=device)
    # a rank that sees no others has a number of its own all the same
    places[trainer.global_rank if trainer.world_size > 1 else 0] = torch.tensor(values, dtype=places.dtype)
    return strategy.reduce(places, reduce_op="sum").flatten().tolist()  # pyright: ignore[reportAttributeAccessIssue]  # of a tensor a tensor


def peak_resident_bytes() -> int:
    """Peak resident size in bytes, since the last reset if the system supports resets (Linux)."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        line = next(line for line in lines if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Utilization(pl.Callback):
    """Log `speed/tflops` and `speed/utilization` (model FLOPs utilization, MFU) at every log point.

    The operations of a training step are counted once, on fake tensors, from the first batch: `training_step` is called
    once more, on a copy of the module that computes nothing. The rate is that of `speed/samples_per_s`, which
    `RunSummary` measures; both are of all processes.

    Args:
        peak_tflops: peak of one device in TFLOP/s; None takes what Lightning knows of it (`get_available_flops`), and
            without that only `speed/tflops` is logged.
    """

    def __init__(self, peak_tflops: float | None = None) -> None:
        self.peak_tflops = peak_tflops
        self.flops_per_sample: float | None = None
        self._counted = False
        self._num_devices = 1

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._num_devices = processes_of(trainer.strategy) * len(process_devices(trainer.strategy))
        if (summary := RunSummary.of(trainer)) is not None:
            summary.figures[type(self)] = self._figures

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        summary = RunSummary.of(trainer) if not self._counted else None
        self._counted = True
        if summary is None:
            return
        summary.pause()
        try:
            self.flops_per_sample = count_flops(pl_module, batch) / (num_samples(batch) or 1)
        except Exception as exc:  # noqa: BLE001  # a step may do anything; the run goes on without this figure
            reason = (str(exc).strip() or type(exc).__name__).splitlines()[0]
            log.info("The operations of a step can't be counted without values: %s", reason)
        if self.peak_tflops is None:
            self.peak_tflops = known_peak_tflops(trainer.strategy.root_device, str(trainer.precision))
        summary.go()

    def _figures(self, times: dict[str, float]) -> dict[str, float]:
        if not self.flops_per_sample:
            return {}
        tflops = self.flops_per_sample * times["samples_per_s"] / 1e12
        part = {"speed/utilization": tflops / self._num_devices / self.peak_tflops} if self.peak_tflops else {}
        return {"speed/tflops": tflops, **part}


def known_peak_tflops(device: torch.device, precision: str) -> float | None:
    """What Lightning knows of a device's peak with a trainer's precision; None if it does not know the device."""
    half = torch.bfloat16 if "bf16" in precision else torch.float16
    flops = get_available_flops(device, half if "16" in precision else getattr(torch, f"float{precision[:2]}"))
    return flops / 1e12 if flops else None


def count_flops(module: pl.LightningModule, batch: Batch) -> int:
    """Count the operations of forward and backward for a batch, two for a multiplication with an addition.

    The step runs once on fake tensors, which have shapes but no values, and on a copy of the module, which logs
    nothing. Attention is counted as its matrix products, without what a fused kernel computes again, and without what
    a causal mask leaves out.
    """
    mode, fakes = FakeTensorMode(allow_non_fake_inputs=True), dict[int, Any]()
    for tensor in (*module.parameters(), *module.buffers()):
        fake: Tensor = mode.from_tensor(tensor.detach())
        is_leaf = isinstance(tensor, nn.Parameter)
        fakes[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_leaf else fake
    shared = {id(value): value for value in (module._trainer, module._fabric) if value is not None}
    counter = FlopCounterMode(display=False)
    with mode, torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        copied = copy.deepcopy(module, {**fakes, **shared})
        silence(copied)
        with counter:
            takes_index = is_param_in_hook_signature(copied.training_step, "batch_idx", min_args=2)
            fake_batch = apply_to_collection(batch, Tensor, mode.from_tensor)
            output = copied.training_step(fake_batch, *([0] if takes_index else []))
            loss: Any = output["loss"] if isinstance(output, dict) else output
            loss.backward()
    return counter.get_total_flops()


def silence(module: pl.LightningModule) -> None:
    """Disable `self.log` and metrics: they read values, and need almost no memory or time."""
    vars(module).update(log=log_nothing, log_dict=log_nothing)
    for part in metrics_of(module):
        vars(part).update(forward=_zero, update=log_nothing)


def _zero(*_: Any, **__: Any) -> Tensor:
    return torch.zeros(())
