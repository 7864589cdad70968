"""Run a zero-weight step: a rank without samples takes part in the reduction of gradients."""

from collections.abc import Generator
from contextlib import contextmanager

import pytorch_lightning as pl
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm

from ..core.untraced_step import untraced_step
from .metrics.sync import MetricSync
from .sync_batchnorm import SyncedBatchNorm


@contextmanager
def zero_weight_step(module: pl.LightningModule, sync: MetricSync, silent: bool = False) -> Generator[None]:
    """Run a step with weight zero: it leaves no trace, and synchronized BatchNorm layers and metrics don't count it.

    Args:
        sync: the exchange of metric states, which the step may ask for by `compute`.
        silent: whether it logs nothing at all: in an evaluation ranks may log different names.
    """
    synced = [layer for layer in module.modules() if isinstance(layer, SyncedBatchNorm)]
    for layer in synced:
        layer.counts = False
    try:
        with untraced_step(module, silent) as metrics, sync.counting(metrics):
            yield
            computed = [(metric, metric._computed) for metric, _ in metrics]
        for metric, value in computed:  # on the other ranks an update has cleared it: all must compute it again
            metric._computed = value
    finally:
        for layer in synced:
            layer.counts = True


def recompute_weights(module: nn.Module) -> None:
    """Compute the weights that torch's hooks set before each forward, on a rank that has run none.

    A rank without samples in an evaluation keeps those of the last training step's forward, made from the parameters
    before the optimizer step; `ModelPruning` would prune other weights on it.
    """
    for layer in module.modules():
        for hook in layer._forward_pre_hooks.values():
            if isinstance(hook, (BasePruningMethod, WeightNorm)):
                hook(layer, ())
