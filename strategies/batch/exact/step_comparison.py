"""Compare a step of a module in parts of a few samples with the same step on all of them; see `verifier.py`."""

import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_structure

from ...core.devices import is_out_of_memory
from ...core.errors import ConfigError, PartsDiffer
from ...core.module_checks import hooked, not_compiling
from ...core.module_log import NoValue
from ...core.patching import without_hooks
from ...core.types import Batch
from ..evaluation_lists import EvaluationLists
from ..results import ResultStructure, combine, is_loss, join_evaluated
from ..run_structures import takes_others_batches
from ..structure import BatchStructure, walk
from .cuts import Cuts, Tried, said
from .loss_reader import Part
from .module_state import Written, are_alike, differences, gradients, small_parameters, tolerance, unlike
from .program_finder import ProgramFinder, proposals
from .programs import RETURNED, Program, Site
from .trial import Cannot, MakesBatch, Ran, Trial
from .verdict import OF_SAMPLES, Plan, Verdict, Views


class StepComparison:
    """Runs a step of a module on a few samples, whole and in parts, and finds how parts make the whole.

    Args:
        strategy: whose module is placed on its devices, and not wrapped.
        structure: cuts a batch into chunks.
        step: name of the module's method; of a step of evaluation what it logs and returns is compared.
        loader: index of the one whose samples are taken.
        together: whether all ranks compare, whose steps are exchanges.
        accumulates: whether the parts are batches of one optimizer step, none of which waits for the others' numbers.
    """

    def __init__(
        self, strategy: Any, structure: BatchStructure, step: str = "training_step", loader: int = 0,
        together: bool = False, accumulates: bool = False,
    ) -> None:  # fmt: skip
        self._module: pl.LightningModule = strategy.lightning_module
        self._name, self._accumulates = strategy.strategy_name, accumulates
        self._trains = step == "training_step"
        devices = {parameter.device for parameter in self._module.parameters()}
        # where a step expects its batch; shards are made of a module that is not on its device yet
        device = devices.pop() if len(devices) == 1 else self._module.device
        layout = getattr(strategy, "layout", None)  # not of one device, where batches are accumulated
        self._in_turn = layout is not None and layout.cut_by.startswith("num_microbatches")
        is_cut = self._trains and hasattr(strategy, "shards") and not together
        self._trial = Trial(
            self._module, step, device, self._name, together, 0 if self._trains else 2, self._in_turn, is_cut
        )
        by_config = getattr(strategy, "is_configured", False)
        self._global_view = getattr(strategy, "global_view", None)
        self._option = "strategy.verify=false" if by_config else f"{type(strategy).__name__}(verify=False)"
        trainer: Any = self._module.trainer
        self._loop = trainer.fit_loop if self._trains else trainer._active_loop
        reads = step == "predict_step" or hooked(f"on_{step[:-5]}_batch_end", trainer, by_user=True)
        self._results = strategy.structures.of_results(step, loader) if reads and not self._trains else None
        self._lists = None if self._trains else strategy.structures.lists
        self._look: tuple[int, MakesBatch, dict[Site, Any] | None] | None = None
        """How many samples were looked at, what makes them, and the operations of the step on them."""
        self._cuts = Cuts(self._trial, self._loop, loader, structure)

    def verdict(self, batch: Batch, views: Views, rest: Sequence[Any]) -> Verdict:
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
            with self._quiet():
                for of_ranks, total, piece in self._cuts.views(batch, views):
                    verdict.in_chunks, trial.of_ranks = trial.of_ranks, of_ranks
                    if total < 2:
                        raise Cannot("its first batch has a single sample")
                    self._compare(total, piece, verdict)
                    if verdict.unlike and not self._trains:
                        break
        except PartsDiffer as exc:
            verdict.refusal = str(exc)
        except Exception as exc:  # arbitrary code, on samples of its own
            if self._trains and isinstance(exc, ConfigError):
                raise
            fewer = is_out_of_memory(exc) and self._cuts.halve()
            if not fewer:
                has_read = batch is not None or takes_others_batches(self._loop)
                self._failed(exc, self._trains and views.ranks and has_read, verdict)
        if fewer:  # now that the error holds no graphs
            return self.verdict(batch, views, rest)
        verdict.in_chunks &= bool(verdict.refusal or verdict.unlike)
        return verdict

    def has_changed(self, rest: Sequence[Any] = ()) -> bool:
        """Whether the step runs other operations on the samples than when it was looked at the last time.

        Where all ranks compute together its first call looks at it, since they compute otherwise than one; `rest` are
        arguments of the step after the batch.
        """
        self._trial.rest = rest or self._trial.rest
        with suppress(Exception), self._quiet():
            if self._look is None and self._trial.together:
                self._look = *next(self._cuts.views(None, Views(ranks=True, chunks=False)))[1:], None
            if self._look is not None:
                total, piece, before = self._look
                self._look = total, piece, self._trial.run(piece, 0, total)[0].tape.shapes
                return before not in (None, self._look[2])
        return False

    def _failed(self, error: Exception, is_late: bool, verdict: Verdict) -> None:
        """Record that nothing could be compared: such a step gets whole batches, if it isn't too late for them."""
        verdict.failed, verdict.raised = True, not isinstance(error, Cannot)
        why = f"{self._trial.step} fails on a few samples ({said(error)})" if verdict.raised else str(error)
        compared = "training" if self._trains else self._trial.step
        line = f"{self._name}: {compared} could not be compared with one device's: {why}."
        if self._global_view == "auto" and verdict.raised and not (is_late or is_out_of_memory(error)):
            verdict.refusal = line  # whole batches are right in any case
        else:
            verdict.told.append(line)

    def _compare(self, total: int, piece: MakesBatch, verdict: Verdict) -> None:
        """Compare all that a step does on some samples, and note what was found.

        Raises:
            PartsDiffer: parts don't make what the whole does.
        """
        tried = self._cuts.tried(total, piece)
        whole, differs = tried.whole, ""
        self._look = total, piece, whole.tape.shapes
        verdict.outside.update(*(ran.outside for ran in tried.steps))
        verdict.rows |= tried.parts[0].rows
        verdict.unused |= any(one.unused for one in tried.steps)
        seen = ProgramFinder(whole, tried.parts)
        if self._trains:
            if not whole.losses:
                raise Cannot("training_step returned no loss")
            found = [self._plan(call, seen, tried) for call in range(len(whole.losses))]
            verdict.plans = [plan for plan, _ in found]
            calls = [call for call, (_, why) in enumerate(found) if why]
            random = [call for call in calls if self._is_random(call, tried)]
            if random and self._trial.evaluates < 2:  # perhaps not in evaluation mode
                self._trial.evaluates += 1
                del tried, seen, whole  # their graphs
                return self._compare(total, piece, verdict)
            if random:
                verdict.told.append(f"{self._name}: training_step draws random numbers, each part its own.")
            differs = next((found[call][1] for call in calls if call not in random), "")
        self._compare_values(seen, tried, verdict)
        if differs:
            *sizes, last = (str(part.num) for part in tried.parts)
            raise PartsDiffer(
                f"{self._name}: computed in {'ranks' if self._trial.of_ranks else 'chunks'} of {', '.join(sizes)} and "
                f"{last} samples, {differs}. Compute what compares samples in evener.over_batch(fn)(...), pad to a "
                f"fixed length,{self._view} or set {self._option} to train nevertheless."
            )
        self._verify_given(tried)
        self._verify_written(tried, verdict)
        if self._lists is not None:
            self._verify_appended(self._lists, tried)
        elif whole.appended and not (self._trial.of_ranks or self._accumulates):
            names = ", ".join(dict.fromkeys(str(path[1]) for path in whole.appended))
            verdict.told.append(f"{self._name}: {names} will have what training_step appends for each part of a batch.")
        if self._results is not None and not self._trial.of_ranks:
            self._verify_returned(self._results, tried)
        return None

    def _verify(
        self, of: Callable[[Ran], Any], joined: Any, tried: Tried, why: str, losses: Sequence[Tensor] = ()
    ) -> None:
        """Refuse parts that, joined, don't make a value of the whole batch, if that is not random."""
        parameters, whole = small_parameters(self._module), of(tried.whole)
        if not are_alike(whole, joined, losses, parameters) and are_alike(
            whole, of(tried.again(seed=2)), (), parameters
        ):
            raise PartsDiffer(f"{self._name}: {self._trial.step} {why}")

    def _verify_given(self, tried: Tried) -> None:
        """Refuse parts that don't give metrics what the whole batch does; their losses are known to."""
        why = (
            "gives a metric other values in parts of a batch. Give it tensors with rows of samples, or call it in "
            "an epoch hook"
        )
        for key, joined in tried.parts[0].given.items():
            self._verify(lambda ran, key=key: ran.given.get(key), joined, tried, why, tried.whole.losses)

    def _verify_returned(self, results: ResultStructure, tried: Tried) -> None:
        """Refuse parts whose results don't make the whole batch's."""
        outputs, sizes = [part.output for part in tried.parts], [part.num for part in tried.parts]
        joined, _ = join_evaluated(outputs, sizes, results, self._trial.device, self._name)
        for _, value in walk(joined):
            if isinstance(value, NoValue):
                raise PartsDiffer(value.reason)
        why = "returns what parts of a batch don't make. Return rows, or means."
        self._verify(lambda ran: ran.output, joined, tried, why)

    def _verify_appended(self, lists: EvaluationLists, tried: Tried) -> None:
        """Refuse parts that append to lists of the module what doesn't make the whole batch's."""
        for path in tried.whole.appended:
            if f"{self._trial.step}.{path[1]}" in lists.options:  # the user's word
                continue
            joined: Any = None
            try:
                joined = lists.joined(self._trial.step, path, [part.appended for part in tried.parts])
            except ConfigError as exc:
                raise PartsDiffer(str(exc)) from exc
            except RuntimeError as exc:  # rows of other shapes
                if is_out_of_memory(exc):
                    raise
            why = (
                f"appends to {path[1]} what parts of a batch don't make. Append rows that each sample makes by itself "
                "(pad to a fixed length), or means over samples."
            )
            self._verify(
                lambda ran, path=path: [v for one in ran.appended.get(path, ()) for v in one.values], joined, tried, why
            )

    def _compare_values(self, seen: ProgramFinder, tried: Tried, verdict: Verdict) -> None:
        """Find how logged values that are no means over samples follow from parts; the loss has its plan."""
        whole = tried.whole
        logged = {name: one for name, one in whole.tape.logged.items() if name != RETURNED}
        losses = [name for name, one in logged.items() if any(is_loss(one.value, loss) for loss in whole.losses)]
        found, unknown = seen.programs()
        for more in tried.others if logged.keys() - set(losses) else ():
            others, left = ProgramFinder(whole, more).programs()
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
            again = tried.again(seed=2).tape.logged
            unknown = [name for name in unknown if name in again and str(again[name].kept) == str(logged[name].kept)]
        if unknown:
            verdict.unlike = (
                f"{self._name}: {self._trial.step} logs {', '.join(map(repr, unknown))}, of which values of parts of a "
                "batch don't make one device's value; they are averaged by samples. Use a metric of torchmetrics."
            )

    def _plan(self, call: int, seen: ProgramFinder, tried: Tried) -> tuple[Plan, str]:
        """The plan by which parts train as the whole; if there is none, one, and which gradient differs by how much."""
        whole, parameters = tried.whole, small_parameters(self._module)
        loss = whole.losses[call]
        if not (loss.requires_grad and parameters):
            return OF_SAMPLES, ""
        if loss.grad_fn is None and self._trial.of_ranks:
            return OF_SAMPLES, "the loss is computed by hooks, in passes that no rank joins in"
        # in manual optimization, and with a loss_weight, nothing else is read in a step
        is_read = self._module.automatic_optimization and whole.weight is None
        plans = [plan for plan in proposals(seen) if not (plan.needs_all and self._accumulates)] if is_read else []
        expected, differing, last = self._gradients([loss], [1.0], parameters), list[tuple[float, str]](), OF_SAMPLES
        if self._trial.together:
            _ = tried.others  # all ranks must run as many
        for last in plans or [OF_SAMPLES]:
            try:
                found = self._differs(call, tried.parts, last, expected, parameters)
                for more in tried.others if found[0] <= tolerance(loss, parameters) else ():
                    found = max(found, self._differs(call, more, last, expected, parameters))
            except (RuntimeError, IndexError) as exc:  # gradients don't go through the program
                if is_out_of_memory(exc):
                    raise
                continue
            if found[0] <= tolerance(loss, parameters):
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
        program = plan.program or Program()
        merged = program.merged(torch.stack([one.rows for one in parts])) if plan.needs_all else torch.empty(0)
        try:
            for part, share in zip(parts if plan.needs_all else (), shares, strict=False):
                part.scale(merged, share)
            found = self._gradients([part.loss for part in parts], shares, parameters)
        finally:
            for handle in itertools.chain.from_iterable(part.handles for part in parts):
                handle.remove()
        if self._trial.together:  # those of parts may be far from the whole's, which is almost 0
            found = [program.value(merged).double()] if plan.needs_all else found
            scale = torch.stack([part.loss.detach().double().abs() for part in parts]).max().nan_to_num()
            pair = ([torch.stack([one[0], scale])] for one in (expected, found))
            return differences(*pair)[0], "the loss"
        names = {id(p): f"the gradient of {name}" for name, p in self._module.named_parameters()}
        of_all = (names.get(id(p), "the gradient of a parameter") for p in parameters)
        return max(zip(differences(expected, found), of_all, strict=True))

    def _gradients(self, losses: Sequence[Tensor], shares: Sequence[float], parameters: Sequence[Any]) -> list[Tensor]:
        """The gradients as hooks on parameters leave them: under ranks they get each part's, else the whole batch's.

        Where ranks compute together each has gradients of its shards; the loss itself is compared there.
        """
        if self._trial.together:
            return [combine([loss.detach().double() for loss in losses], shares)]
        with nullcontext() if self._trial.of_ranks else without_hooks(parameters):
            return gradients(losses, shares, parameters)

    def _is_random(self, call: int, tried: Tried) -> bool:
        """Whether the step gives other gradients with other random numbers."""
        parameters, losses = small_parameters(self._module), (tried.whole.losses, tried.again(seed=2).losses)
        one, two = (self._gradients([own[call]], [1.0], parameters) for own in losses)
        return max(differences(one, two)) > tolerance(losses[0][call], parameters)

    @property
    def _view(self) -> str:
        """What trains the module as it is, where that was switched off, or where it is known too late."""
        option = self._option.replace("verify=", "global_view=")
        if self._global_view is False:
            return f" leave out {option},"
        option = option.replace("false", "true").replace("False", "True")
        return f" set {option}, which is exact but slower," if self._name in ("ddp", "fsdp") else ""

    def _verify_written(self, tried: Tried, verdict: Verdict) -> None:
        """Refuse what a step leaves in the module otherwise in parts, if checkpoints hold it or later steps read it.

        Micro-batches would also write one after the other what the whole writes once. Of the rest, replicas and
        micro-batches keep what one of them has left, and ranks their own, which is told.
        """
        in_turn, by_rank = self._trial.goes_on and self._trains, self._trial.of_ranks and not self._trains
        names = sorted({name for step in tried.steps for name in step.written})
        written = {name: [step.written.get(name) for step in tried.steps] for name in names}
        found = [
            name
            for name, (first, *others) in written.items()
            if any(first is None or one is None or unlike(first.contents, one.contents) for one in others)
        ]
        left = {name: [one and _without_lists(one.contents) for one in written[name]] for name in found}
        lost = [name for name, (first, *others) in left.items() if any(unlike(first, one) for one in others)]
        saved = [name for name in (names if in_turn else found) if any(one and one.is_saved for one in written[name])]
        refused = saved if self._trains else []
        if by_rank:
            self._verify_kept(tried, [name for name in found if name in lost or not _is_attribute(written[name])])
        elif found and not refused and self._reads(tried, lost):
            refused = [*lost, *found]
        if refused:
            by = "in each micro-batch" if in_turn else "by the samples of its part of a batch"
            instead = "num_microbatches=1" if in_turn else f"{self._option} to keep a part's"
            raise PartsDiffer(
                f"{self._name}: {self._trial.step} changes {refused[0]} {by}, unlike one device. Gather what it is "
                f"computed of (self.all_gather), update it in an on_..._batch_end hook, or set {instead}."
            )
        if lost and not by_rank:
            verdict.told.append(
                f"{self._name}: {self._trial.step} leaves {', '.join(lost[:3])} otherwise in parts of a batch than in "
                "the whole one. Use self.log, a metric of torchmetrics, or return it from the step."
            )

    def _verify_kept(self, tried: Tried, names: Sequence[str]) -> None:
        """Refuse ranks that each keep what a step of evaluation adds up: what it changes again on the same samples."""
        if not names:
            return
        before = tried.whole.written
        again, same = tried.again(list(before.values())).written, tried.again().written
        for name in names:
            own, *others = (one.get(name) for one in (before, again, same))
            has_changed, is_random = (own and one and unlike(one.contents, own.contents) for one in others)
            steps = [step.written[name] for step in tried.steps if name in step.written]
            keys, *of_parts = (tree_structure(_without_lists(step.contents)) for step in steps)
            if (has_changed or any(one != keys for one in of_parts)) and not is_random:
                raise PartsDiffer(
                    f"{self._name}: {self._trial.step} adds up {name}, of which each rank would have its own. Use a "
                    "metric of torchmetrics, or append to a list of the module"
                )

    def _reads(self, tried: Tried, names: Sequence[str]) -> bool:
        """Whether the next step computes otherwise with what one of the steps has left than with another's.

        Ranks, and chunks in turn, keep what they have left; other chunks don't, so that what they leave counts as well.
        """
        keeps, found = self._trial.of_ranks or self._in_turn, list[tuple[list[Tensor], list[Any]]]()
        for step in tried.steps:
            try:
                again = tried.again(list(step.written.values()))
            except Exception:  # noqa: BLE001  # a state of other samples doesn't fit these
                if found and not keeps:
                    return True
                continue
            after = self._gradients(again.losses, [1.0] * len(again.losses), small_parameters(self._module))
            kept = map(again.written.get, () if keeps else names)
            found.append((after, [one and _without_lists(one.contents) for one in kept]))
        return any(
            max(differences(found[0][0], other)) > 1e-6 or unlike(found[0][1], left) for other, left in found[1:]
        )

    @contextmanager
    def _quiet(self) -> Generator[None]:
        """Run steps eagerly and with graphs, and have their own gradients leave no trace."""
        before = [(p, p.grad, p.requires_grad) for p in self._module.parameters()]
        try:
            with torch.inference_mode(False), not_compiling():
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


def _is_attribute(steps: Sequence[Written | None]) -> bool:
    """Whether what steps have written is an attribute of a module, whose lists are joined."""
    return any(one is not None and "_parameters" in one.owner for one in steps)


def _reading(given: Sequence[tuple[Any, int]]) -> str:
    """What a `batch_size` is, of what was given for pieces of so many samples; see `Values`."""
    numbers = [number for number, _ in given if isinstance(number, int)]
    if numbers == [num for _, num in given]:
        return "samples"
    return "constant" if len(numbers) == len(given) and len(set(numbers)) == 1 else "given"
