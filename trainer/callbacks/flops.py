"""Count the floating-point operations of a training step on fake tensors, which have shapes but no values."""

import copy
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ...strategies.core.module_checks import metrics_of
from ...strategies.core.types import Batch


def count_flops(module: pl.LightningModule, batch: Batch) -> int:
    """Count the operations of forward and backward, two for a multiplication with an addition.

    The step runs once on a copy of the module, which computes nothing and logs nothing. Attention is counted as its
    matrix products, without what a fused kernel computes again, and without what a causal mask leaves out.

    Args:
        module: the module, on one device.
        batch: a batch as `training_step` gets it.

    Returns:
        The number of operations for this batch.
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
    vars(module).update(log=_nothing, log_dict=_nothing)
    for part in metrics_of(module):
        vars(part).update(forward=_zero, update=_nothing)


def _leaf(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    fake: Tensor = mode.from_tensor(tensor.detach())
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _nothing(*_: Any, **__: Any) -> None:
    """Replaces a function that has no effect on what is counted."""


def _zero(*_: Any, **__: Any) -> Tensor:
    return torch.zeros(())
