"""Verify law 1 before a run's first step: a module, computed in parts of a batch, trains as on the whole batch.

On at most eight samples of the user's dataset, through the user's own `collate_fn`, transfer hooks and step, in one
process, with dropout off, leaving no trace: once whole, and in parts as the strategy makes them.

    parts of ranks    collate(samples[:4]), collate(samples[4:7]), collate(samples[7:])      cut before collating
    chunks            split(collate(samples), [4, 3, 1])                                     cut after it

So in parts of 5 and 3 samples, and of 2: by one cut they may choose the samples that the whole batch does by chance.

Compared are the gradients, what the step writes to the module, and logged values. Nothing is concluded from code, and
from the graph of a loss no more than a proposal of what its terms divide by: what decides is whether numbers differ.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import pytorch_lightning as pl
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature

from ...core.errors import PartsDiffer
from ..run_structures import num_evaluated
from ..structure import BatchStructure
from .comparison import StepComparison
from .verdict import Verdict, Views

_earlier = WeakKeyDictionary[pl.LightningModule, dict[str, Verdict]]()
"""What earlier runs of a module have found, by strategy."""


def verified(
    strategy: Any, views: Views, verifies: bool, args: Sequence[Any],
    share: Callable[[Any], Any] = lambda found: found, is_first: bool = True, structure: BatchStructure | None = None,
    again: Collection[bool] = (), together: bool = False,
) -> Verdict:  # fmt: skip
    """Find by what the losses of a strategy's module divide, before its first step.

    Args:
        views: how the strategy cuts batches.
        verifies: whether a module that trains otherwise than on one device is refused.
        args: arguments of the first training step.
        share: gives all ranks what the first has found.
        structure: cuts batches, of accumulated ones; None for the strategy's.
        again: whether its step has raised an error, or not, where a module that can't be compared will be tried again.
        together: whether all ranks compute each step, and each of them finds the same.

    Raises:
        PartsDiffer: the module trains otherwise; the message says what differs.
    """
    verdict, comparison = None, None
    if is_first or together:
        comparison = StepComparison(strategy, together=together, structure=structure)
        verdict = comparison.verdict(args[0], views, args[1:])
        earlier = _earlier.setdefault(strategy.lightning_module, {})
        if verdict.failed:  # its parameters may be shards by now
            verdict = earlier.get(strategy.strategy_name, verdict)
        else:
            earlier[strategy.strategy_name] = verdict
    found: Verdict = share(verdict)
    if found.waits(again):
        return found
    _tell(found, is_first, verifies or not found.plans)
    if comparison is None or not verifies or together:
        return found
    return replace(found, has_changed=comparison.has_changed)


def _tell(found: Verdict, is_first: bool, verifies: bool = True) -> None:
    """Say what was found, and refuse what differs."""
    if not verifies:
        return
    for line in found.told if is_first else ():
        rank_zero_info(line)
    if found.refusal:
        refusal = PartsDiffer(found.refusal)
        refusal.plans, refusal.in_chunks = found.plans or None, found.in_chunks
        refusal.outside, refusal.unused = found.outside, found.unused
        raise refusal
    if found.unlike and is_first:
        rank_zero_warn(found.unlike)


def find_evaluated(
    strategy: Any, views: Views, step: str, loader: int = 0, allowed: bool = False,
    share: Callable[[Any], Any] = lambda found: found, is_first: bool = True, together: bool = False,
    args: Sequence[Any] = (),
) -> None:  # fmt: skip
    """Find how what a step of evaluation logs follows from parts of a loader's batches; see `verified`.

    Args:
        allowed: whether the step may get whole batches where it doesn't.
        args: arguments of the step with the first batch, where samples can't be chosen.
    """
    module, values, verdict = strategy.lightning_module, strategy.contract.reader.values, None
    if not any(views) or (step, loader) in values.programs:
        return
    if is_first:
        several = num_evaluated(module.trainer._active_loop) > 1
        takes_index = is_param_in_hook_signature(getattr(module, step), "batch_idx", min_args=2)
        batch, *rest = args or (None, *(0,) * takes_index, *(loader,) * several)
        verdict = StepComparison(strategy, step, loader, together).verdict(batch, views, rest)
    found: Verdict = share(verdict)
    if found.unlike and allowed:
        found.refusal, found.unlike = found.refusal or found.unlike, ""
    _tell(found, is_first)
    values.learn(step, loader, found)
