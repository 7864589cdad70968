"""Say where a run is, beyond Lightning's checkpoints, and go on from there exactly, on any number of ranks.

States of k ranks are carried over to k' ranks: first to one device's state, then to each new rank's part of it.

| state of a rank | on one device | on rank r of k' |
|---|---|---|
| random streams of python, numpy, torch and the process's devices | rank 0's | rank r's; new ones for ranks above k |
| position and order of the training loaders | rank 0's, the same on all | the same on all |
| gradients of an unfinished step | the mean over ranks | the same on all; DDP takes their mean |
| sum of loss weights of that step | the sum over ranks | all of it on rank 0 |
| torchmetrics' metrics, accumulated over the epoch | merged in the order of ranks | all of it on rank 0 |
| means and sums of `self.log`, and which metrics it logs | the sum over ranks | an equal part on each |
| which steps get whole batches, and the metrics logged last | rank 0's | the same on all |
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities import move_data_to_device
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from ...strategies.batch.layout import WholeSteps
from ...strategies.core import rng
from ...strategies.core.errors import ConfigError
from ...strategies.core.module_checks import is_metric
from ...strategies.distributed.metrics import MetricStates, resumed_states
from ...strategies.registry import contract_of, devices_in_use, ranks_of
from ...strategies.sharding.whole import map_tensors
from ..logging.series import on_other_ranks
from ._loader_state import ReadAhead, Resumable, stateful
from .file_io import CheckpointError

FORMAT = 1  # of a checkpoint's entry that resumes exactly; files without a number are older than it
State: TypeAlias = dict[str, Any]
Place: TypeAlias = Literal["between_batches", "before_validation", "after_epoch"]


@dataclass(frozen=True)
class Position:
    """The point between two batches, or after an epoch, at which a checkpoint was written."""

    point: Place | None = None  # if a hook saved, which resumes by Lightning's rules
    should_stop: bool = False  # the run was about to
    rows: Mapping[str, int] = field(default_factory=dict[str, int])
    is_global: bool = False  # its batches are those of all ranks
    ranks: Sequence[State] | None = None  # of every rank; of this one only once `for_rank` has made it

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> "Position":
        """Read what `to_dict` returned; an empty mapping if a checkpoint has none."""
        if (number := saved.get("format", 0)) > FORMAT:
            raise CheckpointError(
                f"The checkpoint has format {number}, and this version of evener reads up to {FORMAT}. Resume with the "
                "version that wrote it, or a later one."
            )
        return cls(**{name: saved[name] for name in cls.__dataclass_fields__ if name in saved})

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for a checkpoint."""
        return {"format": FORMAT, **vars(self)}

    @property
    def is_between_batches(self) -> bool:
        """Whether a batch of the same epoch comes next, perhaps after a validation."""
        return self.point in ("between_batches", "before_validation")

    @property
    def own(self) -> State | None:
        """The state with which this rank goes on, after `for_rank`; None if there is none."""
        return self.ranks[0] if self.ranks else None

    def for_rank(self, trainer: pl.Trainer) -> "Position":
        """Return the same point with this rank's state alone."""
        if not self.ranks:
            return self
        same = len(self.ranks) == trainer.world_size
        if self.is_global != counts_global_batches(trainer) or not (self.is_global or same):
            then, now = ("one process" if num == 1 else f"{num} ranks" for num in (len(self.ranks), trainer.world_size))
            rank_zero_warn(
                f"The checkpoint was written by {then} and is resumed by {now}, where a loader's batch is not the "
                "global batch in both: the global batch changes, and the rest of this epoch may repeat or omit "
                "samples. To go on exactly, give the global batch as the loader's batch size, and set "
                "strategy.batch_size_is=global."
            )
        rank = min(trainer.global_rank, trainer.world_size - 1)  # in a global view each is the only one
        own = self.ranks[rank] if same else state_for(self.ranks, rank, trainer.world_size, trainer.lightning_module)
        return replace(self, ranks=[own])


def counts_global_batches(trainer: pl.Trainer) -> bool:
    """Whether the loader's batches are the global ones, so that a position means the same for any number of ranks."""
    ranks = ranks_of(trainer.strategy)
    return trainer.world_size == 1 or (ranks is not None and ranks.batch_size_is == "global")


def capture(trainer: pl.Trainer, accumulating: bool) -> State:
    """Read this process's state, with gradients and loss weights of an unfinished step; every rank must call it."""
    module, own = trainer.lightning_module, capture_own(trainer)
    results: Any = trainer.fit_loop.epoch_loop._results
    logged = {id(result.value) for result in results.values() if not result.is_tensor}
    evaluation: Any = trainer.fit_loop.epoch_loop.val_loop  # within which a hook may save
    return {
        "random": rng.capture(devices_in_use(trainer.strategy), evaluation.random_of_training),
        "gradients": contract_of(trainer.strategy).whole_gradients(module) if accumulating else None,
        **map_tensors(own, lambda tensor: tensor.detach().cpu()),
        "loaders": own["loaders"],
        "weights": own["weights"] if accumulating else 0.0,
        "of_epoch": [name for name, metric in _metrics(module) if id(metric) in logged],
    }


def capture_own(trainer: pl.Trainer) -> State:
    """Read what is no random stream and no gradient; metrics and values are the ones that go on changing."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    return {
        "loaders": _positions(trainer),
        "weights": epoch_loop.automatic_optimization.total,
        "metrics": {name: MetricStates.of(metric).to_dict() for name, metric in _metrics(trainer.lightning_module)},
        "results": epoch_loop._results.capture(),
        "logged": dict(trainer.callback_metrics),
        "whole_steps": sorted(whole.names) if (whole := _whole(trainer)) else [],
    }


def restore(trainer: pl.Trainer, state: State, begins_epoch: bool) -> None:
    """Restore a state that `capture` read; call it after everything that draws random numbers at the start of a run."""
    module = trainer.lightning_module
    if begins_epoch:  # the state is from before the last one's end: what is logged for an epoch begins anew
        of_epoch = state.get("of_epoch", ())
        kept = {name: saved for name, saved in state["metrics"].items() if name not in of_epoch}
        state = {**state, "results": {}, "metrics": kept}
    trainer._logger_connector._callback_metrics.update(state["logged"])
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    epoch_loop._results.restore(state["results"])
    if whole := _whole(trainer):
        whole.go_on(state.get("whole_steps", []))  # files of earlier versions have none
    for name, metric in _metrics(module):
        if name in state["metrics"]:
            MetricStates(**state["metrics"][name]).give(metric)
    epoch_loop.automatic_optimization.total = move_data_to_device(state["weights"], trainer.strategy.root_device)
    if state["gradients"] is not None:
        contract_of(trainer.strategy).restore_gradients(module, state["gradients"])
    devices = devices_in_use(trainer.strategy)
    if state["random"] is None:  # a rank that was not there before
        rng.seed_all(torch.initial_seed() % 2**63, trainer.global_rank, trainer.global_step, devices=devices)
    else:
        rng.restore(state["random"], devices)


def _positions(trainer: pl.Trainer) -> list[State]:
    """The loaders' states, without batches that were prefetched (from loaders without length) but not trained on."""
    ahead, loader = len(getattr(trainer.fit_loop._data_fetcher, "batches", ())), trainer.fit_loop._combined_loader
    states: list[State] = []
    for part in [] if loader is None else stateful(loader):
        states.append(part.before if ahead and isinstance(part, ReadAhead) else part.state_dict())
        if isinstance(part, Resumable):
            states[-1]["position"] = max(states[-1]["position"] - ahead, 0)
    return states


def _whole(trainer: pl.Trainer) -> WholeSteps | None:
    return getattr(trainer.strategy, "whole", None)  # of ranks all are found before the first


def _metrics(module: torch.nn.Module) -> list[tuple[str, Metric]]:
    return [(name, child) for name, child in module.named_modules() if is_metric(child)]


def state_for(ranks: Sequence[State], rank: int, num_ranks: int, module: pl.LightningModule) -> State:
    """Return the state with which a rank goes on, or refuse a metric whose states can't be combined."""
    first, gradients = rank == 0, [state["gradients"] or {} for state in ranks]
    names = dict.fromkeys(name for one in gradients for name in one)  # a rank without one for a parameter has zero
    mean = {name: sum(one[name] for one in gradients if name in one) / len(ranks) for name in names}  # as DDP's
    metrics = {
        name: _metric_part(name, metric, [MetricStates(**state["metrics"][name]) for state in ranks], first)
        for name, metric in module.named_modules()
        if isinstance(metric, Metric) and all(name in state["metrics"] for state in ranks)
    }
    return {
        **ranks[0],
        "random": ranks[rank]["random"] if rank < len(ranks) else None,
        "gradients": None if ranks[0]["gradients"] is None else mean,
        "weights": sum(state["weights"] for state in ranks) if first else 0.0,
        "metrics": metrics,
        "results": on_other_ranks([state["results"] for state in ranks], num_ranks),
    }


def _metric_part(name: str, metric: Metric, saved: Sequence[MetricStates], first: bool) -> dict[str, Any]:
    used = [one for one in saved if one.num_updates]
    if not used:
        return saved[0].to_dict()
    count = max(one.num_updates for one in used)
    whole = resumed_states(metric, used)
    if whole is None:
        raise ConfigError(
            f"The checkpoint was written within an epoch with {len(saved)} processes, and what "
            f"{type(metric).__name__} ({name}) has collected since can't be carried over to another number. Resume "
            f"with {len(saved)}, or from the end of an epoch."
        )
    if first:
        return MetricStates(whole, count).to_dict()
    states = {key: copy.deepcopy(metric._defaults[key]) for key in whole}
    # a metric without updates warns when it is computed; one whose states have no shape yet must not be stacked
    tensors = [(states[key], value) for key, value in whole.items() if isinstance(value, Tensor)]
    is_shaped = all(isinstance(own, Tensor) and own.shape == value.shape for own, value in tensors)
    return MetricStates(states, count if is_shaped else 0).to_dict()
