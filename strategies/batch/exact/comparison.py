"""Compare a step of a module in parts of a few samples with the same step on all of them; see `verifier.py`."""

import itertools
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning_fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only, tree_structure

from ...core.devices import is_out_of_memory
from ...core.errors import ConfigError, PartsDiffer
from ...core.module_checks import hooked, not_compiling
from ...core.module_log import NoValue
from ...core.patching import without_hooks
from ...core.types import Batch
from ..results import combine, is_loss, join_evaluated
from ..run_structures import FewSamples, chunk, takes_others_batches
from ..structure import BatchStructure, walk
from .loss_reader import Part
from .module_state import GENERATORS, Written, are_alike, differences, gradients, small_parameters, tolerance, unlike
from .program_finder import ProgramFinder, proposals
from .programs import RETURNED, Program, Site
from .trial import Cannot, MakesBatch, Ran, Trial
from .verdict import OF_SAMPLES, Plan, Verdict, Views

MOST_SAMPLES = 8


class Tried(NamedTuple):
    """A step on some samples: on all, and in parts of several cuts, of which the first is most of what is compared."""

    whole: Ran
    cuts: list[list[Ran]]

    @property
    def parts(self) -> list[Ran]:
        """Those of the first cut."""
        return self.cuts[0]

    @property
    def steps(self) -> list[Ran]:
        """The whole, and its parts."""
        return [self.whole, *self.parts]


class StepComparison(Trial):
    """Runs a step of a module on a few samples, whole and in parts, and finds how parts make the whole.

    A `structure`, which cuts batches, is given where these are accumulated.
    """

    def __init__(
        self, strategy: Any, step: str = "training_step", loader: int = 0, together: bool = False,
        structure: BatchStructure | None = None,
    ) -> None:  # fmt: skip
        super().__init__(strategy, step, together)
        self._loader, self._accumulates, self._structure = loader, structure is not None, structure
        self._most, trainer = MOST_SAMPLES, self.module.trainer
        self._loop: Any = trainer.fit_loop if self.trains else trainer._active_loop
        self._look: tuple[MakesBatch, int, dict[Site, Any] | None] | None = None
        """What makes the samples that were looked at, how many, and the operations of the step on them."""

    def verdict(self, batch: Batch, views: Views, rest: Sequence[Any]) -> Verdict:
        """Find the plans of the losses and the programs of logged values, and compare.

        `batch` is the first one of the run, for loaders whose samples can't be chosen, and `rest` what the step gets
        after it.
        """
        self.rest = rest
        while True:
            verdict, fewer = Verdict([]), False
            try:
                with self._quiet():
                    self._compare_views(batch, views, verdict)
            except PartsDiffer as exc:
                verdict.refusal = str(exc)
            except Exception as exc:  # arbitrary code, on samples of its own
                if self.trains and isinstance(exc, ConfigError):
                    raise
                fewer = is_out_of_memory(exc) and self._most > 2
                if not fewer:
                    self._failed(exc, views, batch is not None, verdict)
            if not fewer:
                verdict.in_chunks &= bool(verdict.refusal or verdict.unlike)
                return verdict
            self._most //= 2

    def has_changed(self, rest: Sequence[Any] = ()) -> bool:
        """Whether the step runs other operations on the samples than when it was looked at the last time.

        Where all ranks compute together its first call looks at it, since they compute otherwise than one.
        """
        self.rest = rest or self.rest
        with suppress(Exception), self._quiet():
            if self._look is None and self.together:
                self._look = *next(self._views(None, None, Views(ranks=True, chunks=False)))[1:], None
            if self._look is not None:
                piece, total, before = self._look
                self._look = piece, total, self.run(piece, 0, total)[0].tape.shapes
                return before not in (None, self._look[2])
        return False

    def _failed(self, error: Exception, views: Views, has_batch: bool, verdict: Verdict) -> None:
        """Record that nothing could be compared: such a step gets whole batches, if it isn't too late for them."""
        verdict.failed, verdict.raised = True, not isinstance(error, Cannot)
        why = f"{self.step} fails on a few samples ({_said(error)})" if verdict.raised else str(error)
        line = (
            f"{self.name}: {'training' if self.trains else self.step} could not be compared with one device's: {why}."
        )
        has_read = self.trains and views.ranks and (has_batch or takes_others_batches(self._loop))
        may_be_whole = getattr(self.strategy, "global_view", None) == "auto" and not has_read
        if may_be_whole and verdict.raised and not is_out_of_memory(error):
            verdict.refusal = line  # whole batches are right in any case
        else:
            verdict.told.append(line)

    def _compare_views(self, batch: Batch, views: Views, verdict: Verdict) -> None:
        """Compare each view, and note in the verdict what was found."""
        structure = self._structure or self.strategy.structures.of_batch(self.module.trainer, self._loader)
        verdict.plans = [OF_SAMPLES]  # batches can be cut
        if not self.together and any(p.is_meta or isinstance(p, DTensor) for p in self.module.parameters()):
            raise Cannot("its parameters have no values yet, or are cut over ranks")
        for i, (of_ranks, piece, total) in enumerate(self._views(structure, batch, views)):
            self.of_ranks, verdict.in_chunks = of_ranks, i > 0
            if total < 2:
                raise Cannot("its first batch has a single sample")
            self._compare(piece, total, verdict)
            if verdict.unlike and not self.trains:
                break

    def _views(self, structure: Any, batch: Batch, views: Views) -> Iterator[tuple[bool, MakesBatch, int]]:
        """Yield whether parts are those of ranks, or chunks; what makes the batch of the samples from i to j; how many.

        `batch` is the first one of the run, for loaders whose samples can't be chosen.
        """
        try:
            alike = self.together and self.trains
            samples = FewSamples(self.module, self._loop, self._loader, self._most, alike=alike)
        except TypeError as exc:
            num = 0 if batch is None else structure.num_samples(batch)
            if not num:
                raise Cannot(f"its samples can't be chosen from {exc}") from exc
            if views.ranks and not views.chunks and structure.has_shared:
                raise Cannot("it isn't known what a part of its batches is") from exc
            # the run's own step gets it, too, perhaps where there are no graphs
            batch = apply_to_collection(move_data_to_device(batch, self.device), Tensor, Tensor.clone)
            total = min(num, self._most)
            whole = batch if total == num else structure.split(batch, [total, num - total])[0]
            yield False, partial(chunk, structure.split, whole, total=total), total
            return
        total = samples.num
        if views.ranks:
            yield True, partial(samples.batch, device=self.device), total
        if views.chunks:
            yield False, partial(chunk, structure.split, samples.batch(0, total, self.device), total=total), total

    def _tried(self, piece: MakesBatch, total: int) -> Tried:
        """Run the step on samples, whole and in parts."""
        (whole,), found = self.run(piece, 0, total), list[list[Ran]]()
        self._look = piece, total, whole.tape.shapes
        cuts = [(0, (total + 1) // 2, total - 1, total), (0, round(total * 5 / 8), total), (*range(0, total, 2), total)]
        for i, places in enumerate(cuts if total > 2 else cuts[:1]):
            try:
                found.append(self.run(piece, *places))
            except Exception as exc:
                if found:  # not all steps take all parts
                    continue
                if isinstance(exc, (Cannot, PartsDiffer)) or is_out_of_memory(exc):
                    raise
                if i == 0 and total > 2:  # nor one sample
                    continue
                if self.of_ranks:  # by which rank it runs, it fails on the whole batch too, and does so in training
                    self.run(lambda i, j: piece(0, total), 0, total, 2 * total)
                raise PartsDiffer(
                    f"{self.name}: {self.step} fails on parts of a batch ({_said(exc)}). Give every value of the batch "
                    "one row per sample, or put it into an object that defines split(sizes)."
                ) from exc
        return Tried(whole, found)

    def _again(self, seed: int = 1, given: Sequence[Written] = ()) -> Ran:
        """Run the step on the whole once more, with other random numbers or with what another step has left."""
        assert self._look is not None
        piece, total, _ = self._look
        return self.run(piece, 0, total, seed=seed, given=given)[0]

    def _compare(self, piece: MakesBatch, total: int, verdict: Verdict) -> None:
        """Compare all that a step does on some samples, and note what was found.

        Raises:
            PartsDiffer: parts don't make what the whole does.
        """
        tried, differs = self._tried(piece, total), ""
        if self.sees_calls:
            with suppress(Exception):  # a single sample shows what samples choose
                alone = [self.run(piece, i, i + 1)[0] for i in (0, total - 1)]
                verdict.outside |= _chosen(self.module, [*tried.steps, *alone])
            verdict.outside.update(*(ran.outside for ran in tried.steps))
        verdict.rows |= tried.parts[0].rows
        verdict.unused |= any(one.unused for one in tried.steps)
        if self.trains:
            if not tried.whole.losses:
                raise Cannot("training_step returned no loss")
            found = [self._plan(call, tried) for call in range(len(tried.whole.losses))]
            verdict.plans = [plan for plan, _ in found]
            calls = [call for call, (_, why) in enumerate(found) if why]
            random = [call for call in calls if self._is_random(call, tried)]
            if random and self.evaluates < 2:  # perhaps not in evaluation mode
                self.evaluates += 1
                del tried, found  # their graphs
                return self._compare(piece, total, verdict)
            if random:
                verdict.told.append(f"{self.name}: training_step draws random numbers, each part its own.")
            differs = next((found[call][1] for call in calls if call not in random), "")
        self._compare_logged(tried, verdict)
        if differs:
            *sizes, last = (str(part.num) for part in tried.parts)
            view = " set strategy.global_view=true, which is exact but slower," * (self.name in ("ddp", "fsdp"))
            is_false = getattr(self.strategy, "global_view", None) is False
            view = view or " leave out strategy.global_view=false," * is_false
            raise PartsDiffer(
                f"{self.name}: computed in {'ranks' if self.of_ranks else 'chunks'} of {', '.join(sizes)} and {last} "
                f"samples, {differs}. Compute what compares samples in evener.over_batch(fn)(...), pad to a fixed "
                f"length,{view} or set strategy.verify=false to train nevertheless."
            )
        self._verify_results(tried)
        self._verify_written(tried, verdict)
        if not self.trains:
            self._verify_appended(tried)
        elif tried.whole.appended and not (self.of_ranks or self._accumulates):
            names = ", ".join(dict.fromkeys(str(path[1]) for path in tried.whole.appended))
            verdict.told.append(
                f"{self.name}: training_step appends to {names}: an element per part of a batch, not per batch."
            )
        return None

    def _plan(self, call: int, tried: Tried) -> tuple[Plan, str]:
        """The plan by which parts train as the whole; if there is none, one, and which gradient differs by how much."""
        whole, parameters = tried.whole, small_parameters(self.module)
        loss = whole.losses[call]
        if not (loss.requires_grad and parameters):
            return OF_SAMPLES, ""
        if loss.grad_fn is None and self.of_ranks:
            return OF_SAMPLES, "the loss is computed by hooks, in passes that no rank joins in"
        plans = [OF_SAMPLES]
        # in manual optimization, and with a loss_weight, nothing else is read in a step
        if self.module.automatic_optimization and whole.weight is None:
            proposed = proposals(ProgramFinder(whole, tried.parts))
            plans = [plan for plan in proposed if not (plan.needs_all and self._accumulates)] or plans
        expected, most = self._gradients([loss], [1.0], parameters), tolerance(loss, *parameters)
        differing = list[tuple[float, str]]()
        for plan in plans:
            try:
                found = (self._differs(call, parts, plan, expected, parameters) for parts in tried.cuts)
                first = next((one for one in found if not one[0] <= most), None)
            except (RuntimeError, IndexError) as exc:  # gradients don't go through the program
                if is_out_of_memory(exc):
                    raise
                continue
            if first is None:
                return plan, ""
            differing.append(first)
        if not differing:
            return plans[-1], "the loss has no counterpart in each part"
        difference, name = min(differing)
        much = f"{difference:.1%}" if difference >= 0.001 else f"{difference:.1e}"
        by = "is not a number" if difference == float("inf") else f"differs from one device's by {much}"
        return plans[-1], f"{name} {by}"

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
        if self.together:  # those of parts may be far from the whole's, which is almost 0
            found = [program.value(merged).double()] if plan.needs_all else found
            scale = torch.stack([part.loss.detach().double().abs() for part in parts]).max().nan_to_num()
            pair = ([torch.stack([one[0], scale])] for one in (expected, found))
            return differences(*pair)[0], "the loss"
        names = {id(p): f"the gradient of {name}" for name, p in self.module.named_parameters()}
        of_all = (names.get(id(p), "the gradient of a parameter") for p in parameters)
        return max(zip(differences(expected, found), of_all, strict=True))

    def _gradients(self, losses: Sequence[Tensor], shares: Sequence[float], parameters: Sequence[Any]) -> list[Tensor]:
        """The gradients as hooks on parameters leave them: under ranks they get each part's, else the whole batch's.

        Where ranks compute together each has gradients of its shards; the loss itself is compared there.
        """
        if self.together:
            return [combine([loss.detach().double() for loss in losses], shares)]
        with nullcontext() if self.of_ranks else without_hooks(parameters):
            return gradients(losses, shares, parameters)

    def _is_random(self, call: int, tried: Tried) -> bool:
        """Whether the step gives other gradients with other random numbers."""
        parameters, losses = small_parameters(self.module), (tried.whole.losses, self._again(seed=2).losses)
        one, two = (self._gradients([own[call]], [1.0], parameters) for own in losses)
        return max(differences(one, two)) > tolerance(losses[0][call], *parameters)

    def _compare_logged(self, tried: Tried, verdict: Verdict) -> None:
        """Find how logged values that are no means over samples follow from parts; the loss has its plan."""
        whole, found, unknown = tried.whole, dict[str, Any](), set[str]()
        logged = {name: one for name, one in whole.tape.logged.items() if name != RETURNED}
        losses = {name for name, one in logged.items() if any(is_loss(one.value, loss) for loss in whole.losses)}
        for parts in tried.cuts if logged.keys() - losses else tried.cuts[:1]:
            others, left = ProgramFinder(whole, parts).programs()
            found, unknown = {**others, **found}, unknown.union(left)
        has_one = self.trains and self.module.automatic_optimization and not verdict.plans[0].needs_all
        # its weights; ranks have none of a nan
        known = losses if whole.weight is not None or (has_one and not self.of_ranks) else set[str]()
        verdict.programs |= {name: program for name, program in found.items() if name not in unknown | known}
        if (program := verdict.plans[0].program) is not None:
            verdict.programs[RETURNED] = program
        for name in logged:
            given = [(one.tape.logged[name].batch_size, one.num) for one in tried.steps if name in one.tape.logged]
            verdict.readings[name] = _reading(given)
        again = self._again(seed=2).tape.logged if unknown - losses else {}
        same = [name for name in again if name in logged and str(again[name].kept) == str(logged[name].kept)]
        if names := [name for name in same if name in unknown - losses]:  # or random
            verdict.unlike = (
                f"{self.name}: {self.step} logs {', '.join(map(repr, names))}, of which values of parts of a batch "
                "don't make one device's value; they are averaged by samples. Use a metric of torchmetrics."
            )

    def _verify(
        self, of: Callable[[Ran], Any], joined: Any, tried: Tried, why: str, losses: Iterable[Tensor] = ()
    ) -> None:
        """Refuse parts that, joined, don't make a value of the whole batch, if that is not random."""
        parameters, whole = small_parameters(self.module), of(tried.whole)
        differs = not are_alike(whole, joined, losses, parameters)
        if differs and are_alike(whole, of(self._again(seed=2)), (), parameters):
            raise PartsDiffer(f"{self.name}: {self.step} {why}")

    def _verify_results(self, tried: Tried) -> None:
        """Refuse parts that give metrics, whose losses are known, or return other values."""
        why = (
            "gives a metric other values in parts of a batch. Give it tensors with rows of samples, or call it in an "
            "epoch hook"
        )
        for key, joined in tried.parts[0].given.items():
            self._verify(lambda ran, key=key: ran.given.get(key), joined, tried, why, tried.whole.losses)
        reads = self.step == "predict_step" or hooked(f"on_{self.step[:-5]}_batch_end", self.module.trainer, True)
        if self.trains or self.of_ranks or not reads:
            return
        outputs, sizes = [part.output for part in tried.parts], [part.num for part in tried.parts]
        results = self.strategy.structures.of_results(self.step, self._loader)
        joined, _ = join_evaluated(outputs, sizes, results, self.device, self.name)
        for unknown in (value for _, value in walk(joined) if isinstance(value, NoValue)):
            raise PartsDiffer(unknown.reason)
        why = "returns what parts of a batch don't make. Return rows, or means."
        self._verify(lambda ran: ran.output, joined, tried, why)

    def _verify_appended(self, tried: Tried) -> None:
        """Refuse parts that append to lists of the module what doesn't make the whole batch's."""
        lists, parts = self.strategy.structures.lists, [part.appended for part in tried.parts]
        for path in tried.whole.appended:
            if f"{self.step}.{path[1]}" in lists.options:  # the user's word
                continue
            joined: Any = None
            try:
                joined = lists.joined(self.step, path, parts)
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

    def _verify_written(self, tried: Tried, verdict: Verdict) -> None:
        """Refuse what a step leaves in the module otherwise in parts, if checkpoints hold it or later steps read it.

        Micro-batches would also write one after the other what the whole writes once. Of the rest, replicas and
        micro-batches keep what one of them has left, and ranks their own, which is told.
        """
        in_turn, by_rank = self.goes_on and self.trains, self.of_ranks and not self.trains
        names = sorted({name for step in tried.steps for name in step.written})
        written = {name: [step.written.get(name) for step in tried.steps] for name in names}
        found = [name for name in names if _differ([one and one.value for one in written[name]])]
        lost = [name for name in found if _differ([_left(one) for one in written[name]])]
        saved = [name for name in (names if in_turn else found) if any(one and one.is_saved for one in written[name])]
        drawn = [name for name in names if any(one and isinstance(one.value, GENERATORS) for one in written[name])]
        refused = [*(saved if self.trains else ()), *(() if self.of_ranks else drawn)]
        if not refused and found and self._reads(tried, lost):
            refused = [*lost, *found]
        for name in lost if by_rank else ():  # such as keys of their own
            if len({str(tree_structure(_left(one))) for one in written[name] if one}) > 1:
                refused.append(name)
        if refused:
            by = "in each micro-batch" if in_turn else "by the samples of its part of a batch"
            instead = "strategy.num_microbatches=1" if in_turn else "strategy.verify=false to keep a part's"
            raise PartsDiffer(
                f"{self.name}: {self.step} changes {refused[0]} {by}, unlike one device. Gather what it is computed "
                f"of (self.all_gather), use a metric of torchmetrics, or set {instead}."
            )
        if lost and not by_rank:
            verdict.told.append(
                f"{self.name}: {self.step} leaves {', '.join(lost[:3])} otherwise in parts of a batch than in the "
                "whole one. Use self.log, a metric of torchmetrics, or return it from the step."
            )

    def _reads(self, tried: Tried, names: Sequence[str]) -> bool:
        """Whether the next step computes otherwise with what one of the steps has left than with another's.

        In training ranks, and chunks in turn, keep what they have left; else what the next step leaves counts as well.
        """
        keeps, found = self.in_turn or (self.of_ranks and self.trains), list[tuple[Any, Any]]()
        for step in tried.steps:
            try:
                again = self._again(given=list(step.written.values()))
            except Exception:  # noqa: BLE001  # a state of other samples doesn't fit these
                if found and not (keeps or self.of_ranks):
                    return True
                continue
            after = self._gradients(again.losses, [1.0] * len(again.losses), small_parameters(self.module))
            found.append((after, [_left(again.written.get(name)) for name in (() if keeps else names)]))
        return any(
            max(differences(found[0][0], other), default=0.0) > 1e-6 or unlike(found[0][1], left)
            for other, left in found[1:]
        )

    @contextmanager
    def _quiet(self) -> Generator[None]:
        """Run steps eagerly and with graphs, and have their own gradients leave no trace."""
        before = [(p, p.grad, p.requires_grad) for p in self.module.parameters()]
        try:
            with torch.inference_mode(False), not_compiling():
                yield
        finally:
            for parameter, gradient, is_trained in before:
                parameter.grad = gradient
                parameter.requires_grad_(is_trained)


def _differ(values: Sequence[Any]) -> bool:
    return any(unlike(values[0], one) for one in values[1:])


def _left(written: Written | None) -> Any:
    """What a step has left, without the lists of modules, whose elements are joined."""
    if written is None or not isinstance(written.owner, nn.Module):
        return written and written.value
    return tree_map_only(list, lambda _: None, written.value, is_leaf=lambda one: type(one) is list)


def _reading(given: Sequence[tuple[Any, int]]) -> str:
    """What a `batch_size` is, of what was given for pieces of so many samples; see `Values`."""
    numbers = [number for number, _ in given if isinstance(number, int)]
    if numbers == [num for _, num in given]:
        return "samples"
    return "constant" if len(numbers) == len(given) and len(set(numbers)) == 1 else "given"


def _said(error: Exception) -> str:
    """What an error says, in short."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def _chosen(module: nn.Module, steps: Sequence[Ran]) -> set[str]:
    """The submodules that steps call unequally often or in other orders, others of their kind, and those in them."""
    counts = [Counter(step.calls) for step in steps]
    found = {name for name in set[str]().union(*counts) if len({count[name] for count in counts}) > 1}
    orders = [[name for name in step.calls if name not in found] for step in steps]
    found.update(*(same for same in zip(*orders, strict=True) if len({*same}) > 1))

    def kind(name: str) -> tuple[str, type[nn.Module]]:  # what the experts of a layer have in common
        return name.rpartition(".")[0], type(module.get_submodule(name))

    kinds = set(map(kind, found))
    paths = {name: itertools.accumulate(name.split("."), "{}.{}".format) for name, _ in module.named_modules()}
    return {name for name, path in paths.items() if not kinds.isdisjoint(map(kind, path))}
