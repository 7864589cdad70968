"""Refuse what mixes the samples of a batch before the step sees it: a rank has some of them, one device all.

A hook that changes batches, or a collate function, keeps samples apart if nothing but one sample's values depends on
that sample. So with one sample replaced by another, and equal random numbers, the other samples keep their values:

    x * 2, padding, an augmentation of each sample      1 of 8 samples changes
    .7 * x + .3 * x.flip(0), x - x.mean(0)              2, or all of them
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data.dataloader import default_collate

from ..batch.evidence import LoaderEvidence
from ..batch.run_structures import loader_evidence, transfer_hooks
from ..batch.tree import at, walk
from ..core.errors import ConfigError
from ..core.types import Batch
from ..core.untraced_step import trial_step

_SEEDS = (1, 2)
_ROUNDING = 1e-4
"""Of values, as a fraction of the largest."""
_MOST_ELEMENTS = 2**28
"""Of a tensor, times the rows that are looked for in another place."""


def verify_apart(trainer: pl.Trainer, strategy: str) -> None:
    """Refuse, before a run's first step, a collate function and hooks that mix samples; warn if they do so at random.

    Args:
        strategy: name that begins messages.

    Raises:
        ConfigError: they mix samples.
    """
    evidence, hooks = loader_evidence(trainer), transfer_hooks(trainer)
    made = [loader.collate_fn for _, loader in evidence.loaders() if hasattr(loader, "collate_fn")]
    steps = dict[str, LoaderEvidence]()
    if any(collate is not default_collate for collate in made):
        steps["the loader's collate_fn"] = replace(evidence, transform=None)
    if hooks:
        steps[" or ".join(hooks)] = evidence
    for name, shown in steps.items():
        try:  # arbitrary code: what fails here shows nothing
            with trial_step(trainer.lightning_module, evaluates=False):
                is_random = _mixes_at_random(shown)
        except Exception:  # noqa: BLE001  # see above
            continue
        if is_random is not None:
            _tell(f"{strategy}: {name} mixes the samples of a batch", is_random)


def _tell(told: str, is_random: bool) -> None:
    """Refuse a mixture, or warn of one that is drawn at random."""
    if is_random:
        rank_zero_warn(f"{told} at random. Each rank mixes its own samples, with its own random numbers.")
        return
    raise ConfigError(
        f"{told}: with one sample replaced, others have other values. A rank would mix its own samples only, and "
        "training would not be one device's. Compute it in the dataset, from each sample alone; or use strategy=dp or "
        "strategy=model_parallel, whose batches are cut after it, strategy=single_device, or "
        "strategy.verify_loss=false (fsdp has no such option), which trains otherwise than one device."
    )


def _mixes_at_random(evidence: LoaderEvidence) -> bool | None:
    """Whether samples are mixed at random; None if nothing shows that they are mixed."""
    num, batch, other = evidence.replaced(_SEEDS[0])
    if not any(_is_mixed(one, two, num) for one, two in _pairs(batch, other)):
        return None
    (_, again, _), (_, drawn, _) = (evidence.replaced(seed) for seed in _SEEDS)
    if not _are_alike(batch, again):  # random numbers of a generator of its own
        return None
    return not _are_alike(batch, drawn)


def _pairs(batch: Batch, other: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors of numbers of two batches; counts and indices may depend on all samples without mixing them."""
    for path, value in walk(batch):
        twin = at(other, path) if isinstance(value, Tensor) else None
        if not isinstance(value, Tensor) or not isinstance(twin, Tensor):
            continue
        is_number = value.is_floating_point() or value.dtype is torch.uint8
        if is_number and value.layout is twin.layout is torch.strided:
            yield value, twin


def _are_alike(batch: Batch, other: Batch) -> bool:
    return all(
        one.shape == two.shape and torch.allclose(one, two, rtol=0, atol=_tolerance(one), equal_nan=True)
        for one, two in _pairs(batch, other)
    )


def _is_mixed(values: Tensor, others: Tensor, num: int) -> bool:
    """Whether more than one of `num` samples has changed, whichever dimension is that of samples."""
    if values.shape != others.shape or not values.numel() or _are_joined(values, others, num):
        return False
    dims = [dim for dim, size in enumerate(values.shape) if not size % num]
    return bool(dims) and num > 1 and all(
        len(_new_rows(values.movedim(dim, 0), others.movedim(dim, 0))) > values.shape[dim] // num for dim in dims
    )  # fmt: skip


def _are_joined(values: Tensor, others: Tensor, num: int) -> bool:
    """Whether samples of several rows each, such as the nodes of graphs, seem to follow one another."""
    new = _new_rows(values, others)
    if len(values) == num or len(new) == len(values):
        return False
    return bool(len(values) % num) or new == list(range(len(values) - len(new), len(values)))  # of the last sample


def _new_rows(values: Tensor, others: Tensor) -> list[int]:
    """The rows of a tensor that another one has nowhere: collate functions may sort samples."""
    small = _tolerance(values)
    values, others = (rows.detach().reshape(len(rows), -1).double().nan_to_num() for rows in (values, others))
    changed = ((values - others).abs().amax(1) > small).nonzero().flatten().tolist()
    if len(changed) * math.prod(others.shape) > _MOST_ELEMENTS:
        return []
    return [row for row in changed if (others - values[row]).abs().amax(1).min() > small]


def _tolerance(values: Tensor) -> float:
    return _ROUNDING * float(values.detach().double().nan_to_num().abs().max()) if values.numel() else 0.0
