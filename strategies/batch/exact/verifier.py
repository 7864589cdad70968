"""Verify law 1 before a run's first step: a module, computed in parts of a batch, trains as on the whole batch.

On at most eight samples of the user's dataset, through the user's own `collate_fn`, transfer hooks and step, in one
process, with dropout off, leaving no trace: once whole, and in parts as the strategy makes them.

    parts of ranks    collate(samples[:4]), collate(samples[4:7]), collate(samples[7:])      cut before collating
    chunks            split(collate(samples), [4, 3, 1])                                     cut after it

So in parts of 5 and 3 samples, and of 2: by one cut they may choose the samples that the whole batch does by chance.

Compared are the gradients, what the step writes to the module, and logged values. Nothing is concluded from code, and
from the graph of a loss no more than a proposal of what its terms divide by: what decides is whether numbers differ.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...core.devices import is_out_of_memory
from ...core.errors import ConfigError, PartsDiffer
from ...core.module_checks import hooked, not_compiling
from ...core.no_value import NoValue
from ...core.patching import without_hooks
from ...core.types import Batch
from ..evaluation_lists import EvaluationLists
from ..losses import is_loss, join_evaluated
from ..results import ResultStructure, combine
from ..run_structures import equal_parts, num_evaluated
from ..samples import FewSamples, chunk
from ..structure import BatchStructure
from ..tree import walk
from ..whole.over_batch import end_of_step
from .module_state import unlike
from .plans import OF_SAMPLES, Part, Plan, proposals
from .trial import Cannot, MakesBatch, Ran, Trial
from .values import RETURNED, Comparison, Program

MOST_SAMPLES = 8
_MOST_ELEMENTS = 2**16
"""Of the parameters whose gradients are compared."""
_EXACT, _CLOSE = 1e-8, 1e-3
"""Differences, relative to the largest number: of rounding in float64, and in narrower types."""


@dataclass
class Verdict:
    """What was found.

    Args:
        plans: of the loss; in manual optimization of each call of `manual_backward`; empty if batches can't be cut.
        refusal: what differs, and what to do; empty if nothing does.
        told: lines for the log, and whether they are warnings.
        unused: whether some trained parameters take no part in a loss.
        programs: of logged values.
        failed: whether nothing could be compared; as the step has `raised` an error, perhaps.
        in_chunks: whether parts of ranks are right, and chunks of these are not.
        unlike: the logged values that parts don't give, and what to do; empty if they give all.
        readings: what the `batch_size` of logged values is, see `Values`.
        rows: the arguments of metrics that are rows, see `Values`.
        uneven: the submodules that parts don't call as the whole batch does: samples choose them.
        outside: those of which a step uses parameters outside of their forward.
    """

    plans: list[Plan] = field(default_factory=lambda: [OF_SAMPLES])
    refusal: str = ""
    told: list[tuple[str, bool]] = field(default_factory=list["tuple[str, bool]"])
    unused: bool = False
    programs: dict[str, Program] = field(default_factory=dict[str, Program])
    unlike: str = ""
    readings: dict[str, str] = field(default_factory=dict[str, str])
    rows: set[Any] = field(default_factory=set[Any])
    failed: bool = False
    raised: bool = False
    in_chunks: bool = False
    uneven: set[str] = field(default_factory=set[str])
    outside: set[str] = field(default_factory=set[str])

    def waits(self, again: Collection[bool]) -> bool:
        """Whether to compare later, see `verified`."""
        return self.failed and self.raised in again


_earlier = WeakKeyDictionary[pl.LightningModule, dict[str, Verdict]]()
"""What earlier runs of a module have found, by strategy."""


class Views(NamedTuple):
    """How a strategy cuts batches: before they are collated, after it, or both."""

    ranks: bool
    chunks: bool


class Verifier:
    """Runs a step of a module on a few samples, whole and in parts.

    Args:
        strategy: whose module is placed on its devices, and not wrapped.
        structure: cuts a batch into chunks.
        step: name of the module's method; of a step of evaluation what it logs and returns is compared.
        loader: index of the one whose samples are taken.
        together: whether all ranks verify, whose steps are exchanges.
        samples: to compute; None for those that the loop's loaders have.
        accumulates: whether the parts are batches of one optimizer step, none of which waits for the others' numbers.
    """

    def __init__(
        self, strategy: Any, structure: BatchStructure, step: str = "training_step", loader: int = 0,
        together: bool = False, accumulates: bool = False, samples: FewSamples | None = None,
    ) -> None:  # fmt: skip
        self._module: pl.LightningModule = strategy.lightning_module
        (self._name, self._structure, self._loader, self._accumulates) = (
            strategy.strategy_name, structure, loader, accumulates,
        )  # fmt: skip
        self._trains = step == "training_step"
        devices = {parameter.device for parameter in self._module.parameters()}
        # where a step expects its batch; shards are made of a module that is not on its device yet
        device = devices.pop() if len(devices) == 1 else self._module.device
        layout = getattr(strategy, "layout", None)  # not of one device, where batches are accumulated
        self._in_turn = layout is not None and layout.cut_by.startswith("num_microbatches")
        self._is_cut = self._trains and hasattr(strategy, "shards") and not together
        self._trial = Trial(
            self._module, step, device, self._name, together, not self._trains, self._in_turn, self._is_cut
        )
        by_config = getattr(strategy, "is_configured", False)
        self._global_view = getattr(strategy, "global_view", None)
        self._option = "strategy.verify=false" if by_config else f"{type(strategy).__name__}(verify=False)"
        trainer: Any = self._module.trainer
        self._loop = trainer.fit_loop if self._trains else trainer._active_loop
        reads = step == "predict_step" or hooked(f"on_{step[:-5]}_batch_end", trainer, by_user=True)
        self._results = strategy.structures.of_results(step, loader) if reads and not self._trains else None
        self._samples, self._cuts, self._equal = samples, list[tuple[int, ...]](), list[int]()
        self._most, self._lists = MOST_SAMPLES, EvaluationLists() if self._trains else strategy.structures.lists

    def verify(self, batch: Batch, views: Views, rest: Sequence[Any]) -> Verdict:
        """Find the plans of the losses and the programs of logged values, and compare.

        Args:
            batch: the first one of the run, for loaders whose samples can't be chosen; None if there is none.
            views: how the strategy cuts batches.
            rest: arguments of the step after the batch.
        """
        trial, verdict, fewer = self._trial, Verdict(), False
        trial.rest, trial.of_ranks = rest, False
        try:
            if not trial.together and any(p.is_meta or isinstance(p, DTensor) for p in self._module.parameters()):
                raise Cannot("its parameters have no values yet, or are cut over ranks")
            with torch.inference_mode(False), not_compiling(), self._quiet():
                for of_ranks, total, piece in self._pieces(batch, views):
                    verdict.in_chunks, trial.of_ranks = trial.of_ranks, of_ranks
                    if total < 2:
                        raise Cannot("its first batch has a single sample")
                    self._compare(total, piece, verdict)
                    if verdict.refusal or (verdict.unlike and not self._trains):
                        break
        except PartsDiffer as exc:
            verdict.refusal = str(exc)
        except Exception as exc:  # arbitrary code, on samples of its own
            if self._trains and isinstance(exc, ConfigError):
                raise
            verdict.raised = not isinstance(exc, Cannot)
            verdict.failed, fewer = True, self._most > 2 and is_out_of_memory(exc)
            if not fewer:
                why = str(exc) if isinstance(exc, Cannot) else f"{trial.step} fails on a few samples ({_said(exc)})"
                compared = "training" if self._trains else trial.step
                line = f"{self._name}: {compared} could not be compared with one device's: {why}."
                is_late = self._trains and views.ranks and batch is not None and not trial.together
                if self._global_view == "auto" and not (is_late or isinstance(exc, Cannot) or is_out_of_memory(exc)):
                    verdict.refusal = line  # whole batches are right in any case
                else:
                    verdict.told.append((line, False))
        if fewer:  # now that the error holds no graphs
            self._most, self._samples = self._most // 2, None
            return self.verify(batch, views, rest)
        verdict.in_chunks &= bool(verdict.refusal or verdict.unlike)
        return verdict

    def _pieces(self, batch: Batch, views: Views) -> Iterator[tuple[bool, int, MakesBatch]]:
        """Yield each view: whether it is that of ranks, the samples, and what makes a batch of those from i to j."""
        device, split = self._trial.device, self._structure.split
        try:
            samples = self._samples or FewSamples(self._module, self._loop, self._loader, self._most)
        except TypeError as exc:
            num = 0 if batch is None else self._structure.num_samples(batch)
            if not num:
                raise Cannot(f"its samples can't be chosen from {exc}") from exc
            if views.ranks and (self._structure.vague if views.chunks else self._structure.unclear) is not None:
                raise Cannot("it isn't known what a part of its batches is") from exc
            batch = move_data_to_device(batch, device)  # it may wait on the host
            # the run's own step gets it, too, perhaps where there are no graphs
            batch = apply_to_collection(batch, Tensor, Tensor.clone)
            total = min(num, self._most)
            whole = batch if total == num else split(batch, [total, num - total])[0]
            yield False, total, lambda i, j: chunk(split, whole, i, j, total)
            return
        total = samples.num
        if views.ranks and samples.unclear is not None:
            is_late = self._trains and self._trial.together  # for whole batches
            raise Cannot("it isn't known what a part of its batches is") if is_late else samples.unclear
        if views.ranks:
            self._equal = equal_parts(self._loop)
            of_ranks = min(total, 6) if 3 in self._equal else total
            yield True, of_ranks, lambda i, j: samples.batch(i, j, device)
        if views.chunks:
            whole = samples.batch(0, total, device)
            yield False, total, lambda i, j: chunk(split, whole, i, j, total)

    def _runs(self, total: int, piece: MakesBatch) -> tuple[Ran, list[Ran]]:
        """Run a step on samples, whole and in parts; in equal ones if the run has no others (`drop_last=True`)."""
        of_ranks = self._trial.of_ranks
        (whole,) = self._trial.run(piece, 0, total)
        cuts = [(0, (total + 1) // 2, total - 1, total), (0, round(total * 5 / 8), total), (*range(0, total, 2), total)]
        cuts = cuts[: 3 if total > 2 else 1]
        if of_ranks and total % 2 == 0 and self._equal:
            fitting = [size for size in self._equal if total % size == 0 and size < total] or [total // 2]
            cuts = [tuple(range(0, total + 1, size)) for size in fitting]
        while True:
            places, *self._cuts = cuts
            try:
                return whole, self._trial.run(piece, *dict.fromkeys(places))
            except Exception as exc:
                if isinstance(exc, Cannot) or is_out_of_memory(exc):
                    raise
                failed, cuts = exc, self._cuts
            if not (cuts and places[-1] - places[-2] == 1 and self._fails(piece, *places[-2:])):
                break  # not all steps take one sample
        if isinstance(failed, PartsDiffer):
            raise failed
        if of_ranks:  # by which rank it runs, it fails on the whole batch too, and does so in training
            self._trial.run(lambda i, j: piece(0, total), 0, total, 2 * total)
        raise PartsDiffer(
            f"{self._name}: {self._trial.step} fails on parts of a batch ({_said(failed)}). Give every value of the "
            "batch one row per sample, or put it into an object that defines split(sizes)."
        ) from failed

    def _fails(self, piece: MakesBatch, i: int, j: int) -> bool:
        """Whether the step fails on the samples from i to j alone."""
        with suppress(Exception):
            self._trial.run(piece, i, j)
            return False
        return True

    def _more(self, piece: MakesBatch) -> Iterator[list[Ran]]:
        """Run the step in parts of further cuts, as far as it takes them."""
        for places in self._cuts:
            with suppress(Exception):
                yield self._trial.run(piece, *dict.fromkeys(places))

    def _compare(self, total: int, piece: MakesBatch, verdict: Verdict) -> None:
        whole, parts = self._runs(total, piece)
        if self._is_cut:
            with suppress(Exception):  # a single sample shows what samples choose
                alone = [self._trial.run(piece, i, i + 1)[0] for i in (0, total - 1)]
                verdict.uneven |= _uneven([whole, *parts, *alone])
            verdict.outside.update(*(ran.outside for ran in (whole, *parts)))
        seen = Comparison(whole, parts)
        verdict.rows |= parts[0].rows
        if not self._trains:
            self._verify_given(whole, parts[0].given, piece)
            self._compare_written([whole, *parts], piece, verdict)
            self._verify_appended(whole, parts, piece)
            if self._results is not None and not self._trial.of_ranks:
                self._verify_returned(self._results, whole, parts, piece)
            return self._compare_values(seen, whole, piece, verdict)
        if not whole.losses:
            raise Cannot("training_step returned no loss")
        if end_of_step(self._module) is not None:
            return None  # it computes the loss of the joined outputs
        plans = list[Plan]()
        for call in range(len(whole.losses)):
            plan, unlike_whole = self._plan(call, seen, piece, whole, *parts)
            plans.append(plan)
            if not unlike_whole:
                continue
            if self._is_random(call, whole, piece):
                if not self._trial.evaluates:
                    self._trial.evaluates = True
                    del whole, parts, seen  # their graphs
                    return self._compare(total, piece, verdict)
                line = f"{self._name}: training_step draws random numbers, each part of a batch its own."
                verdict.told.append((line, False))
            elif (
                whole.weight is None
                or self._plan(call, seen, piece, *(replace(one, weight=None) for one in (whole, *parts)))[1]
            ):
                *sizes, last = (str(part.num) for part in parts)
                verdict.refusal = (
                    f"{self._name}: computed in {'ranks' if self._trial.of_ranks else 'chunks'} of "
                    f"{', '.join(sizes)} and {last} samples, {unlike_whole}. Compute what compares "
                    f"samples in evener.over_batch(fn)(...), pad to a fixed length,{self._view} or set {self._option} "
                    "to train nevertheless."
                )
            else:  # the user's word, where parts could be right
                line = (
                    f"{self._name}: with its loss_weight, in parts of a batch, {unlike_whole}. Return "
                    "the number that the loss is a mean over, or leave loss_weight out."
                )
                verdict.told.append((line, True))
        verdict.plans = plans
        verdict.unused = verdict.unused or any(one.unused for one in (whole, *parts))
        if not verdict.refusal:
            self._compare_written([whole, *parts], piece, verdict)
            self._verify_given(whole, parts[0].given, piece)
        self._compare_values(seen, whole, piece, verdict)
        return None

    def _verify_given(self, whole: Ran, given: dict[Any, Any], piece: MakesBatch) -> None:
        """Refuse parts that don't give metrics what the whole batch does; their losses are known to."""
        parameters = _small_parameters(self._module)
        for key, joined in given.items():
            if not _are_alike(whole.given.get(key), joined, whole.losses, parameters):
                (again,) = self._trial.run(piece, 0, whole.num, seed=2)
                if _are_alike(whole.given.get(key), again.given.get(key), [], parameters):  # and is not random
                    raise PartsDiffer(
                        f"{self._name}: {self._trial.step} gives a metric other values in parts of a batch. Give it "
                        "tensors with rows of samples, or call it in training_step_end or in an epoch hook"
                    )

    def _verify_returned(self, results: ResultStructure, whole: Ran, parts: Sequence[Ran], piece: MakesBatch) -> None:
        """Refuse parts whose results don't make the whole batch's, if that is not random."""
        step, outputs, sizes = self._trial.step, [part.output for part in parts], [part.num for part in parts]
        joined, _ = join_evaluated(outputs, sizes, results, self._trial.device, self._name)
        unknown = [value.reason for _, value in walk(joined) if isinstance(value, NoValue)]
        parameters = _small_parameters(self._module)
        if not unknown and not _are_alike(whole.output, joined, [], parameters):
            (again,) = self._trial.run(piece, 0, whole.num, seed=2)
            if _are_alike(whole.output, again.output, [], parameters):
                unknown = [f"{self._name}: {step} returns what parts of a batch don't make. Return rows, or means."]
        if unknown:
            raise PartsDiffer(unknown[0])

    def _verify_appended(self, whole: Ran, parts: Sequence[Ran], piece: MakesBatch) -> None:
        """Refuse parts of which what they append to a list doesn't make what the whole batch does, if not random."""
        step, parameters = self._trial.step, _small_parameters(self._module)
        for path, (added,) in whole.appended.items():
            if f"{step}.{path[1]}" in self._lists.options:  # the user's word
                continue
            joined: Any = None
            try:
                joined = self._lists.joined(step, path, [part.appended for part in parts])
            except ConfigError as exc:
                raise PartsDiffer(str(exc)) from exc
            except RuntimeError as exc:  # rows of other shapes
                if is_out_of_memory(exc):
                    raise
            if not _are_alike(added.values, joined, [], parameters):
                (again,) = self._trial.run(piece, 0, whole.num, seed=2)
                if _are_alike(whole.appended, again.appended, [], parameters):
                    raise PartsDiffer(
                        f"{self._name}: {step} appends to {path[1]} what parts of a batch don't make. Append rows that "
                        "each sample makes by itself (pad to a fixed length), or means over samples."
                    )

    def _compare_values(self, seen: Comparison, whole: Ran, piece: MakesBatch, verdict: Verdict) -> None:
        """Find how logged values that are no means over samples follow from parts; the loss has its plan."""
        logged = {name: one for name, one in whole.tape.logged.items() if name != RETURNED}
        losses = [name for name, one in logged.items() if any(is_loss(one.value, loss) for loss in whole.losses)]
        found, unknown = seen.programs()
        for more in self._more(piece) if logged.keys() - set(losses) else ():
            others, left = Comparison(whole, more).programs()
            found, unknown = {**others, **found}, [*dict.fromkeys((*unknown, *left))]
        found = {name: program for name, program in found.items() if name not in unknown}
        has_one = self._trains and self._module.automatic_optimization and not verdict.plans[0].needs_all
        if whole.weight is not None or (has_one and not self._trial.of_ranks):  # its weights; ranks have none of a nan
            found = {name: program for name, program in found.items() if name not in losses}
        verdict.programs |= found
        if (program := verdict.plans[0].program) is not None:
            verdict.programs[RETURNED] = program
        for name in logged:
            given = [(p.tape.logged[name].batch_size, p.num) for p in seen.pieces if name in p.tape.logged]
            verdict.readings[name] = _reading(given)
        if unknown := [name for name in unknown if name not in losses]:  # or random
            again = self._trial.run(piece, 0, whole.num, seed=2)[0].tape.logged
            unknown = [name for name in unknown if name in again and str(again[name].kept) == str(logged[name].kept)]
        if unknown:
            verdict.unlike = (
                f"{self._name}: {self._trial.step} logs {', '.join(map(repr, unknown))}, of which values of parts of a "
                "batch don't make one device's value; they are averaged by samples. Use a metric of torchmetrics."
            )

    def _plan(self, call: int, seen: Comparison, piece: MakesBatch, whole: Ran, *parts: Ran) -> tuple[Plan, str]:
        """The plan by which parts train as the whole; if there is none, one, and which gradient differs by how much."""
        parameters, loss = _small_parameters(self._module), whole.losses[call]
        if not (loss.requires_grad and parameters):
            return OF_SAMPLES, ""
        if loss.grad_fn is None and self._trial.of_ranks:
            return OF_SAMPLES, "the loss is computed by hooks, in passes that no rank joins in"
        # in manual optimization, and with a loss_weight, nothing else is read in a step
        is_read = self._module.automatic_optimization and whole.weight is None
        plans = [plan for plan in proposals(seen) if not (plan.needs_all and self._accumulates)] if is_read else []
        expected, differing, last = self._gradients([loss], [1.0], parameters), list[tuple[float, str]](), OF_SAMPLES
        for last in plans or [OF_SAMPLES]:
            if last.needs_all and self._trial.together:
                return last, ""  # its program makes the whole's loss
            try:
                found = self._differs(call, parts, last, expected, parameters)
                for more in self._more(piece) if found[0] <= _tolerance(loss, parameters) else ():
                    if all(len(one.losses) > call for one in more):
                        kept = [replace(one, weight=None) for one in more] if whole.weight is None else more
                        found = max(found, self._differs(call, kept, last, expected, parameters))
            except (RuntimeError, IndexError) as exc:  # gradients don't go through the program
                if is_out_of_memory(exc):
                    raise
                continue
            if found[0] <= _tolerance(loss, parameters):
                return last, ""
            differing.append(found)
        if not differing:
            return last, "the loss has no counterpart in each part"
        difference, name = min(differing)
        much = f"{difference:.1%}" if difference >= 0.001 else f"{difference:.1e}"
        by = "is not a number" if difference == float("inf") else f"differs from one device's by {much}"
        return last, f"{name} {by}"

    def _differs(
        self, call: int, ran: Sequence[Ran], plan: Plan, expected: Sequence[Tensor], parameters: Sequence[Any]
    ) -> tuple[float, str]:
        """By how much the gradient of the parameter differs that differs most, and its name."""
        parts = [Part(one.losses[call], plan, one.num, one.tape) for one in ran]
        weights = [
            float(part.weight if one.weight is None else one.weight) for part, one in zip(parts, ran, strict=True)
        ]
        shares = [weight / (sum(weights) or 1) for weight in weights]
        try:
            for part, share in zip(parts if plan.needs_all else (), shares, strict=False):
                part.scale(part.program.merged([one.rows for one in parts]), share)
            found = self._gradients([part.loss for part in parts], shares, parameters)
        finally:
            for handle in itertools.chain.from_iterable(part.handles for part in parts):
                handle.remove()
        if self._trial.together:  # those of parts may be far from the whole's, which is almost 0
            scale = torch.stack([part.loss.detach().double().abs() for part in parts]).max().nan_to_num()
            pair = ([torch.stack([one[0], scale])] for one in (expected, found))
            return _differences(*pair)[0], "the loss"
        names = {id(p): f"the gradient of {name}" for name, p in self._module.named_parameters()}
        of_all = (names.get(id(p), "the gradient of a parameter") for p in parameters)
        return max(zip(_differences(expected, found), of_all, strict=True))

    def _gradients(self, losses: Sequence[Tensor], shares: Sequence[float], parameters: Sequence[Any]) -> list[Tensor]:
        """The gradients as hooks on parameters leave them: under ranks they get each part's, else the whole batch's.

        Where ranks compute together each has gradients of its shards; the loss itself is compared there.
        """
        if self._trial.together:
            return [combine([loss.detach().double() for loss in losses], shares)]
        with nullcontext() if self._trial.of_ranks else without_hooks(parameters):
            return _gradients(losses, shares, parameters)

    def _is_random(self, call: int, whole: Ran, piece: MakesBatch) -> bool:
        """Whether the step gives other gradients with other random numbers."""
        parameters = _small_parameters(self._module)
        (again,) = self._trial.run(piece, 0, whole.num, seed=2)
        one, two = (self._gradients([step.losses[call]], [1.0], parameters) for step in (whole, again))
        return max(_differences(one, two)) > _tolerance(whole.losses[call], parameters)

    @property
    def _view(self) -> str:
        """What trains the module as it is, where that was switched off, or where it is known too late."""
        option = self._option.replace("verify=", "global_view=")
        if self._global_view is False:
            return f" leave out {option},"
        option = option.replace("false", "true").replace("False", "True")
        late = self._name in ("ddp", "fsdp") and self._trial.of_ranks
        return f" set {option}, which is exact but slower," if late else ""

    def _compare_written(self, steps: Sequence[Ran], piece: MakesBatch, verdict: Verdict) -> None:
        """Refuse what a step leaves in the module otherwise in parts, if checkpoints hold it or later steps read it.

        Of the rest, replicas and micro-batches keep what one of them has left, which is told; and so of evaluations.
        """
        if self._in_turn and self._trains and not self._trial.of_ranks:
            steps = self._moved(steps, piece)
        written = {name: [step.written.get(name) for step in steps] for step in steps for name in step.written}
        parameters = dict(self._module.named_parameters())
        in_turn = [name for name in sorted(written) if name in parameters] if self._in_turn and self._trains else []
        found = [
            name
            for name, (first, *others) in sorted(written.items())
            if any(first is None or one is None or unlike(first.contents, one.contents) for one in others)
        ]
        left = {name: [one and _without_lists(one.contents) for one in written[name]] for name in found}
        lost = [name for name, (first, *others) in left.items() if any(unlike(first, one) for one in others)]
        saved = [name for name in found if self._trains and any(one and one.is_saved for one in written[name])]
        asks = bool(found) and not (in_turn or saved or (self._trial.of_ranks and not self._trains))
        read = [*lost, *found][:1] if asks and self._reads(steps, piece, lost) else []
        for name in [*in_turn, *saved, *read][:1]:
            instead = "num_microbatches=1" if in_turn else f"{self._option} to keep a part's"
            repeats = self._in_turn and not self._trial.of_ranks
            by = "in each micro-batch" if repeats else "by the samples of its part of a batch"
            verdict.refusal = (
                f"{self._name}: {self._trial.step} changes {name} {by}, unlike one device. Gather what it is computed "
                f"of (self.all_gather), update it in an on_..._batch_end hook, or set {instead}."
            )
        if lost and not (verdict.refusal or self._trial.of_ranks):
            line = (
                f"{self._name}: {self._trial.step} leaves {', '.join(lost[:3])} otherwise in parts of a batch than in "
                "the whole one. Use self.log, a metric of torchmetrics, or return it from the step."
            )
            verdict.told.append((line, False))

    def _moved(self, steps: Sequence[Ran], piece: MakesBatch) -> Sequence[Ran]:
        """Run the steps from other buffers where they write any: an estimate that has converged moves again."""
        saved = [one for one in steps[0].written.values() if one.is_saved and not isinstance(one.value, nn.Parameter)]
        noise = torch.Generator().manual_seed(0)
        others = [
            replace(one, contents=one.contents * (1 + torch.rand(one.value.shape, generator=noise).to(one.value)))
            for one in saved
            if one.value.is_floating_point()
        ]
        if not others:
            return steps
        whole, *parts = steps
        ends = itertools.accumulate((part.num for part in parts), initial=0)
        (again,) = self._trial.run(piece, 0, whole.num, given=others)
        return [again, *self._trial.run(piece, *ends, given=others)]

    def _reads(self, steps: Sequence[Ran], piece: MakesBatch, names: Sequence[str]) -> bool:
        """Whether the next step computes otherwise with what one of some steps has left than with another's.

        Ranks, and chunks in turn, keep what they have left; other chunks don't, so that what they leave counts as well.
        """
        keeps, found = self._trial.of_ranks or self._in_turn, list[tuple[list[Tensor], list[Any]]]()
        for step in steps:
            try:
                (again,) = self._trial.run(piece, 0, steps[0].num, given=list(step.written.values()))
            except Exception:  # noqa: BLE001  # a state of other samples doesn't fit these
                if found and not keeps:
                    return True
                continue
            gradients = self._gradients(again.losses, [1.0] * len(again.losses), _small_parameters(self._module))
            kept = map(again.written.get, () if keeps else names)
            left = [one and _without_lists(one.contents) for one in kept]
            found.append((gradients, left))
        return any(
            max(_differences(found[0][0], other)) > 1e-6 or unlike(found[0][1], left) for other, left in found[1:]
        )

    @contextmanager
    def _quiet(self) -> Generator[None]:
        """Have the step's own gradients leave no trace."""
        before = [(p, p.grad, p.requires_grad) for p in self._module.parameters()]
        try:
            yield
        finally:
            for parameter, gradient, is_trained in before:
                parameter.grad = gradient
                parameter.requires_grad_(is_trained)


def _without_lists(value: Any) -> Any:
    """A value without the lists in it, whose elements parts append, and with the keys of dictionaries in one order."""
    if isinstance(value, dict):
        return {key: _without_lists(value[key]) for key in sorted(value, key=str)}
    return None if type(value) is list else tuple(map(_without_lists, value)) if type(value) is tuple else value


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def _uneven(steps: Sequence[Ran]) -> set[str]:
    """The submodules that some steps don't call as often as others, or not in the same order."""
    counts = [Counter(step.calls) for step in steps]
    found = {name for name in set[str]().union(*counts) if len({count[name] for count in counts}) > 1}
    orders = [[name for name in step.calls if name not in found] for step in steps]
    return found.union(*(same for same in zip(*orders, strict=True) if len({*same}) > 1))


def _gradients(losses: Sequence[Tensor], shares: Sequence[float], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The sum of the gradients of losses, each times its share."""
    total = [
        torch.zeros_like(p, dtype=torch.float64 if p.dtype is torch.float64 else torch.float32) for p in parameters
    ]
    for loss, share in zip(losses, shares, strict=True):
        if not loss.requires_grad:
            continue
        found: Sequence[Tensor | None] = ()
        with suppress(RuntimeError):  # reentrant checkpoints go backward no other way
            found = torch.autograd.grad(loss * share, parameters, allow_unused=True, retain_graph=True)
        # nor do hooks that compute gradients
        if all(one is None for one in found):  # pyright: ignore[reportUnnecessaryComparison]  # of what is unused
            for parameter in parameters:
                parameter.grad = None
            (loss * share).backward(retain_graph=True)
            found = [parameter.grad for parameter in parameters]
        for one, gradient in zip(total, found, strict=True):
            if gradient is not None:
                one += gradient.to_dense() if gradient.is_sparse else gradient
    return total


def _small_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Some of the parameters that are trained, the smallest first."""
    trained = sorted((p for p in module.parameters() if p.requires_grad), key=nn.Parameter.numel)
    sums = itertools.accumulate(p.numel() for p in trained)
    return [p for i, (p, total) in enumerate(zip(trained, sums, strict=True)) if not i or total <= _MOST_ELEMENTS]


def _are_alike(one: Any, other: Any, losses: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    """Whether two values hold the same tensors, numbers and strings, but for what is one of some losses."""
    kinds = (Tensor, np.ndarray, int, float, str)
    ours, theirs = ([leaf for _, leaf in walk(value) if isinstance(leaf, kinds)] for value in (one, other))
    for a, b in zip(ours, theirs, strict=False):
        if isinstance(b, Tensor) and any(is_loss(a, loss) for loss in losses):
            continue
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype.kind in "biufc":
            a, b = torch.as_tensor(a), torch.as_tensor(b)
        is_float = isinstance(a, float) or (isinstance(a, Tensor) and a.is_floating_point())
        if unlike(a, b, _tolerance(a, parameters) if is_float else 1e-6):
            return False
    return len(ours) == len(theirs)


def _tolerance(value: Any, parameters: Sequence[Tensor]) -> float:
    numbers = [one for one in (value, *parameters) if isinstance(one, Tensor) and one.is_floating_point()]
    eps = max((torch.finfo(one.dtype).eps for one in numbers), default=torch.finfo(torch.float32).eps)
    return _EXACT if eps < 1e-12 else max(_CLOSE, 16 * eps)


def _differences(expected: Sequence[Tensor], found: Sequence[Tensor]) -> list[float]:
    """By how much each gradient differs, relative to the largest number in those expected; infinity if by nan."""
    largest = max((float(one.abs().max()) for one in expected if one.numel()), default=0.0) or 1.0
    pairs = zip(expected, found, strict=True)
    return [float((a - b).abs().nan_to_num(torch.inf).max()) / largest if a.numel() else 0.0 for a, b in pairs]


def verified(
    strategy: Any, views: Views, verifies: bool, args: Sequence[Any],
    share: Callable[[Any], Any] = lambda found: found, is_first: bool = True, structure: BatchStructure | None = None,
    again: Collection[bool] = (), together: bool = False, samples: FewSamples | None = None,
) -> Verdict:  # fmt: skip
    """Find by what the losses of a strategy's module divide, before its first step.

    Args:
        views: how the strategy cuts batches.
        verifies: whether a module that trains otherwise than on one device is refused.
        args: arguments of the first training step.
        share: gives all ranks what the first has found.
        is_first: whether this is the first rank.
        structure: cuts batches, of accumulated ones; None for the strategy's.
        again: whether its step has raised an error, or not, where a module that can't be compared will be tried again.
        together: whether all ranks compute each step, and each of them finds the same.
        samples: see `Verifier`.

    Raises:
        PartsDiffer: the module trains otherwise; the message says what differs.
    """
    verdict: Verdict | None = None
    if is_first or together:
        try:
            own = structure or strategy.structures.of_batch(strategy.lightning_module.trainer)
            verifier = Verifier(strategy, own, together=together, accumulates=structure is not None, samples=samples)
        except PartsDiffer as exc:  # batches that can't be cut, of which the other ranks have yet to learn
            return _told(share(Verdict([], str(exc))), is_first)
        verdict, earlier = verifier.verify(args[0], views, args[1:]), _earlier.setdefault(strategy.lightning_module, {})
        if verdict.failed:  # its parameters may be shards by now
            verdict = earlier.get(strategy.strategy_name, verdict)
        else:
            earlier[strategy.strategy_name] = verdict
    found: Verdict = share(verdict)
    return found if found.waits(again) else _told(found, is_first, verifies or not found.plans)


def _told(found: Verdict, is_first: bool, verifies: bool = True) -> Verdict:
    """Say what was found, and refuse what differs."""
    for line, warns in found.told if is_first and verifies else ():
        (rank_zero_warn if warns else rank_zero_info)(line)
    if found.unlike and is_first and verifies:
        rank_zero_warn(found.unlike)
    if found.refusal and verifies:
        refusal = PartsDiffer(found.refusal)
        refusal.plans, refusal.in_chunks = found.plans or None, found.in_chunks
        refusal.outside, refusal.unused = found.outside, found.unused
        raise refusal
    return found


def _reading(given: Sequence[tuple[Any, int]]) -> str:
    """What a `batch_size` is, of what was given for pieces of so many samples; see `Values`."""
    numbers = [number for number, _ in given if isinstance(number, int)]
    if numbers == [num for _, num in given]:
        return "samples"
    return "constant" if len(numbers) == len(given) and len(set(numbers)) == 1 else "given"


def find_evaluated(
    strategy: Any,
    views: Views,
    step: str,
    loader: int = 0,
    allowed: bool = False,
    share: Callable[[Any], Any] = lambda found: found,
    is_first: bool = True,
    together: bool = False,
    args: Sequence[Any] = (),
) -> None:
    """Find how what a step of evaluation logs follows from parts of a loader's batches; see `verified`.

    Args:
        allowed: whether the step may get whole batches where it doesn't.
        args: arguments of the step with the first batch, where samples can't be chosen.

    Raises:
        PartsDiffer: parts don't make what the whole batch does.
    """
    module, values, verdict = strategy.lightning_module, strategy.contract.reader.values, None
    if not any(views) or (step, loader) in values.programs:
        return
    if is_first:
        trainer, several = module.trainer, num_evaluated(module.trainer._active_loop) > 1
        takes_index = is_param_in_hook_signature(getattr(module, step), "batch_idx", min_args=2)
        batch, *rest = args or (None, *(0,) * takes_index, *(loader,) * several)
        structure = strategy.structures.of_batch(trainer, loader)
        verdict = Verifier(strategy, structure, step, loader, together).verify(batch, views, rest)
    found: Verdict = share(verdict)
    if found.unlike and allowed:
        found.refusal, found.unlike = found.refusal or found.unlike, ""
    _told(found, is_first)
    values.learn(step, loader, found.programs, found.readings, found.rows)
