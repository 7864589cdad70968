"""Log how many operations per second a step computes, and which fraction of the peak that is."""

import copy
import logging
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.throughput import get_available_flops
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from ...strategies.batch.structure import num_samples
from ...strategies.core.module_checks import metrics_of
from ...strategies.core.module_log import log_nothing
from ...strategies.core.types import Batch
from ...strategies.registry import process_devices, processes_of
from .step_times import RunSummary

log = logging.getLogger(__name__)


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
