"""Capture and restore the state that exact resuming needs beyond Lightning's checkpoints.

`_resume_point.py` carries it over to another number of ranks.

| state | kept per rank |
|---|---|
| random states of python, numpy, torch and the process's devices | yes |
| position of the training loaders, and the random state of their order | yes |
| gradients and loss weights accumulated so far, if saved inside an accumulated step | yes |
| states of the module's torchmetrics metrics, accumulated over the epoch | yes |
| values that `self.log` accumulates over the epoch, and which of the metrics it logs | yes |
| what is known of the results of parts of batches, which decides how the first ones are cut | yes |
| which steps get whole batches, as their modules train otherwise in parts, or these can't be made | yes |
| metrics logged last, which schedulers and early stopping read | no, they are equal |
"""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities import move_data_to_device
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torchmetrics import Metric

from ...strategies.batch.whole.whole_steps import WholeSteps
from ...strategies.core import rng
from ...strategies.core.module_checks import is_metric
from ...strategies.distributed.metrics.states import Mark, SavedMetric
from ...strategies.distributed.metrics.sync import MetricSync
from ...strategies.registry import contract_of, process_devices, ranks_of
from ...strategies.sharding.whole import map_tensors
from ._loader_state import ReadAhead, Resumable, ResumableLoader


def capture(trainer: pl.Trainer, accumulating: bool) -> dict[str, Any]:
    """Read this process's state, with gradients and loss weights of an unfinished step; every rank must call it."""
    module, own = trainer.lightning_module, capture_own(trainer)
    results: Any = trainer.fit_loop.epoch_loop._results
    logged = {id(result.value) for result in results.values() if not result.is_tensor}
    evaluation: Any = trainer.fit_loop.epoch_loop.val_loop
    return {
        "random": getattr(evaluation, "random_of_training", None) or rng.capture(devices_in_use(trainer)),
        "gradients": contract_of(trainer.strategy).whole_gradients(module) if accumulating else None,
        **map_tensors(own, lambda tensor: tensor.detach().cpu()),
        "loaders": own["loaders"],
        "weights": own["weights"] if accumulating else 0.0,
        "of_epoch": [name for name, metric in _metrics(module) if id(metric) in logged],
    }


def capture_own(trainer: pl.Trainer) -> dict[str, Any]:
    """Read what is no random stream and no gradient; metrics and values are the ones that go on changing."""
    loader, sync = trainer.fit_loop._combined_loader, _metric_sync(trainer)
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    return {
        "loaders": [] if loader is None else _positions(trainer, loader),
        "weights": epoch_loop.accumulation.total,
        "metrics": {
            name: SavedMetric.of(metric, [] if sync is None else sync.marks_of(metric)).to_dict()
            for name, metric in _metrics(trainer.lightning_module)
        },
        "results": epoch_loop._results.capture(),
        "logged": dict(trainer.callback_metrics),
        "whole_steps": sorted(whole.names) if (whole := _whole(trainer)) else [],
    }


def restore(trainer: pl.Trainer, state: dict[str, Any], begins_epoch: bool) -> None:
    """Restore a state that `capture` read; call it after everything that draws random numbers at the start of a run.

    If it begins an epoch, although the state is from before the last one's end, values and metrics that are logged for
    an epoch begin anew.
    """
    module = trainer.lightning_module
    if begins_epoch:
        of_epoch = state.get("of_epoch", ())
        kept = {name: saved for name, saved in state["metrics"].items() if name not in of_epoch}
        state = {**state, "results": {}, "metrics": kept}
    trainer._logger_connector._callback_metrics.update(state["logged"])
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    epoch_loop._results.restore(state["results"])
    if whole := _whole(trainer):
        whole.go_on(state.get("whole_steps", []))  # files of earlier versions have none
    sync = _metric_sync(trainer)
    for name, metric in _metrics(module):
        if name in state["metrics"]:
            saved = SavedMetric.read(state["metrics"][name])
            saved.give(metric)
            if sync is not None:
                sync.restore_marks(metric, [Mark((0, *mark.place), mark.sizes) for mark in saved.marks])
    epoch_loop.accumulation.total = move_data_to_device(state["weights"], trainer.strategy.root_device)
    if state["gradients"] is not None:
        contract_of(trainer.strategy).restore_gradients(trainer.lightning_module, state["gradients"])
    if state["random"] is None:  # a rank that was not there before
        devices = devices_in_use(trainer)
        rng.seed_all(torch.initial_seed() % 2**63, trainer.global_rank, trainer.global_step, devices=devices)
    else:
        rng.restore(state["random"], devices_in_use(trainer))


def restore_generators(loader: CombinedLoader, states: list[dict[str, Any]]) -> None:
    """Restore the generators of loaders and samplers at the start of a new epoch."""
    stateful = [part for part in loader.flattened if hasattr(part, "state_dict")]
    for part, state in zip(stateful, states, strict=False):
        if isinstance(part, ResumableLoader):
            part.load_generators(state)


def metric_states(module: torch.nn.Module) -> dict[str, SavedMetric]:
    """Copy what torchmetrics' metrics of the module have accumulated, for `restore_metrics`."""
    saved = ((name, SavedMetric.of(metric, [])) for name, metric in _metrics(module))
    return {name: one._replace(states=map_tensors(one.states, torch.clone)) for name, one in saved}


def restore_metrics(module: torch.nn.Module, states: Mapping[str, SavedMetric]) -> None:
    """Set the metrics of a module to what `metric_states` copied."""
    for name, metric in _metrics(module):
        metric.reset()
        if name in states:
            states[name].give(metric)


def devices_in_use(trainer: pl.Trainer) -> list[torch.device]:
    """The devices of this process's parameters, root device first."""
    root = trainer.strategy.root_device
    devices = {parameter.device: None for parameter in trainer.lightning_module.parameters()}
    devices.pop(root, None)
    return list(dict.fromkeys([root, *devices, *process_devices(trainer.strategy)]))


def _positions(trainer: pl.Trainer, loader: CombinedLoader) -> list[dict[str, Any]]:
    """The loaders' states, without batches that were prefetched (from loaders without length) but not trained on."""
    ahead = len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))
    parts = [part for part in loader.flattened if hasattr(part, "state_dict")]
    states = [part.state_dict() for part in parts]
    for i, part in enumerate(parts):
        if isinstance(part, Resumable):
            states[i]["position"] = max(states[i]["position"] - ahead, 0)
        elif ahead and isinstance(part, ReadAhead):
            states[i] = part.before
    return states


def _metric_sync(trainer: Any) -> MetricSync | None:
    """The strategy's exchange of metrics between ranks; it knows which batches their states come from."""
    ranks = ranks_of(trainer.strategy)
    return None if ranks is None else ranks.contract.metrics.sync


def _whole(trainer: pl.Trainer) -> WholeSteps | None:
    return getattr(trainer.strategy, "whole", None)  # of ranks all are found before the first


def _metrics(module: torch.nn.Module) -> list[tuple[str, Metric]]:
    return [(name, child) for name, child in module.named_modules() if is_metric(child)]
