"""Log where a step's time goes, how many operations per second it computes, and which part of the peak that is."""

import copy
import logging
import time
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from ...strategies.batch.structure import num_samples
from ...strategies.core.devices import device_model
from ...strategies.core.module_checks import metrics_of
from ...strategies.core.module_log import log_nothing
from ...strategies.core.types import Batch
from ...strategies.registry import process_devices, processes_of
from .step_times import PHASES, RunSummary, StepClock

log = logging.getLogger(__name__)

HALF_PEAKS: dict[str, float] = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12,
    "A10G": 70e12, "A10": 125e12, "L40S": 362e12, "L4": 121e12, "V100": 125e12, "T4": 65e12,
}  # fmt: skip
"""Operations per second in 16 bits on dense matrices, by a part of the device's name, as NVIDIA's data sheets say."""

MATMUL_SIZE = 1024


class Utilization(pl.Callback):
    """Log `speed/tflops` and `speed/utilization` (model FLOPs utilization, MFU) at every log point.

    So are `speed/forward_ms`, `speed/backward_ms` and `speed/optimizer_ms`, means per optimizer step of rank 0 on its
    root device: up to the loss, the backward pass with the communication in it, and the rest (clipping, the update,
    logging and callbacks). In manual optimization a forward pass that follows a backward pass counts for the optimizer.

    The operations of a training step are counted once, on fake tensors, from the first batch: `training_step` is called
    once more, on a copy of the module that computes nothing. The rate is that of `speed/samples_per_s`, which
    `RunSummary` measures; both are of all processes. Precision other than 16 bits, and devices that are not known, are
    compared with a matrix product measured at the start.

    Args:
        peak_tflops: peak of one device in TFLOP/s; None looks it up or measures it.
    """

    def __init__(self, peak_tflops: float | None = None) -> None:
        self.peak_tflops = peak_tflops
        self.flops_per_sample: float | None = None
        self._counted = False
        self._clock = StepClock()
        self._num_devices = 1

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._num_devices = processes_of(trainer.strategy) * len(process_devices(trainer.strategy))
        if (summary := RunSummary.of(trainer)) is not None:
            self._clock, summary.figures[type(self)] = summary.clock, self._figures

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._counted:
            self._counted = True
            self._clock.enter(None)
            self._clock.pause()
            self._count(trainer, pl_module, batch)
            self._clock.go()
            self._clock.enter("forward")

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._clock.enter("backward")

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._clock.enter("optimizer")

    def _figures(self, times: dict[str, float]) -> dict[str, float]:
        values = {f"speed/{phase}_ms": times[f"{phase}_ms"] for phase in PHASES}
        if self.flops_per_sample and self.peak_tflops:
            tflops = self.flops_per_sample * times["samples_per_s"] / 1e12
            values |= {"speed/tflops": tflops, "speed/utilization": tflops / self._num_devices / self.peak_tflops}
        return values

    def _count(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any) -> None:
        """Count the operations of a training step, and find the peak to compare them with."""
        try:
            self.flops_per_sample = count_flops(module, batch) / (num_samples(batch) or 1)
        except Exception as exc:  # noqa: BLE001  # a step may do anything; the run goes on without this figure
            reason = (str(exc).strip() or type(exc).__name__).splitlines()[0]
            log.info("The operations of a step can't be counted without values: %s", reason)
        if self.flops_per_sample and self.peak_tflops is None:
            self.peak_tflops = peak_flops(trainer.strategy.root_device, str(trainer.precision)) / 1e12


def peak_flops(device: torch.device, precision: str) -> float:
    """Operations per second that a device reaches at most with a trainer's precision."""
    half = "16" in precision
    known = [peak for part, peak in HALF_PEAKS.items() if part in device_model(device)]
    if half and known:
        return known[0]
    dtype = (torch.bfloat16 if "bf16" in precision else torch.float16) if half else torch.float32
    return measured_peak(device, torch.float64 if "64" in precision else dtype)


def measured_peak(device: torch.device, dtype: torch.dtype, num_tries: int = 5) -> float:
    """The best of a few products of square matrices, in operations per second; it waits for the device."""
    matrix = torch.ones(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=dtype)
    best_s = float("inf")
    for _ in range(num_tries):
        start = time.perf_counter()
        (matrix @ matrix)[0, 0].item()
        best_s = min(best_s, time.perf_counter() - start)
    return 2 * MATMUL_SIZE**3 / best_s


def count_flops(module: pl.LightningModule, batch: Batch) -> int:
    """Count the operations of forward and backward for a batch, two for a multiplication with an addition.

    The step runs once on fake tensors, which have shapes but no values, and on a copy of the module, which logs
    nothing. Attention is counted as its matrix products, without what a fused kernel computes again, and without what
    a causal mask leaves out.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, Any] = {id(tensor): _leaf(mode, tensor) for tensor in (*module.parameters(), *module.buffers())}
    shared = {id(value): value for value in (module._trainer, module._fabric) if value is not None}
    counter = FlopCounterMode(display=False)
    with mode, torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        fake = copy.deepcopy(module, {**fakes, **shared})
        silence(fake)
        with counter:
            takes_index = is_param_in_hook_signature(fake.training_step, "batch_idx", min_args=2)
            fake_batch = apply_to_collection(batch, Tensor, mode.from_tensor)
            output = fake.training_step(fake_batch, *([0] if takes_index else []))
            loss: Any = output["loss"] if isinstance(output, dict) else output
            loss.backward()
    return counter.get_total_flops()


def silence(module: pl.LightningModule) -> None:
    """Disable `self.log` and metrics: they read values, and need almost no memory or time."""
    vars(module).update(log=log_nothing, log_dict=log_nothing)
    for part in metrics_of(module):
        vars(part).update(forward=_zero, update=log_nothing)


def _leaf(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    fake: Tensor = mode.from_tensor(tensor.detach())
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _zero(*_: Any, **__: Any) -> Tensor:
    return torch.zeros(())
