"""Verify law 1 before a run's first step: a module, computed in parts of a batch, trains as on the whole batch.

On at most eight samples of the user's dataset, through the user's own `collate_fn`, transfer hooks and step, in one
process, with dropout off, leaving no trace: once whole, and once in parts as the strategy makes them.

    parts of ranks    collate(samples[:5]), collate(samples[5:])      cut before collating
    chunks            split(collate(samples), [5, 3])                 cut after it

Compared are the gradients, what the step writes to the module, and logged values. Nothing is concluded from code, and
from the graph of a loss no more than a proposal of what its terms divide by: what decides is whether numbers differ.
"""

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities import move_data_to_device
from pytorch_lightning.core.optimizer import _init_optimizers_and_lr_schedulers
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from ...core.devices import is_out_of_memory
from ...core.errors import ConfigError, PartsDiffer
from ...core.executor import Piece
from ...core.internals import not_compiling
from ...core.module_log import LOG_OPTIONS, lightning_modules, module_log, received
from ...core.patching import Replacement, hooks_of, without_hooks
from ...core.types import Batch
from ...core.untraced_step import trial_step
from ..losses import is_loss, weight_in
from ..part_metrics import OfParts, outermost_metrics
from ..run_structures import parts_are_equal
from ..samples import FewSamples, seeded
from ..structure import BatchStructure
from ..whole.gathering import SimulatedRanks, simulating
from ..whole.meeting import Combine, Meeting, seat
from ..whole.over_batch import end_of_step, ended
from ..whole.whole_steps import WholeSteps
from .module_state import ModuleState, Written, unlike
from .plans import OF_SAMPLES, Part, Plan, proposals, ratio
from .values import LOSS, Program, Seen, find_programs

_SAMPLES = 8
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
        failed: whether nothing could be compared.
        meets: whether parts met that can't meet in training.
        in_chunks: whether parts of ranks are right, and chunks of these are not.
        unlike: the logged values that parts don't give, and what to do; empty if they give all.
        constants: the logged values whose `batch_size` is the same whatever the samples are; None if that is not known.
    """

    plans: list[Plan] = field(default_factory=lambda: [OF_SAMPLES])
    refusal: str = ""
    told: list[tuple[str, bool]] = field(default_factory=list["tuple[str, bool]"])
    unused: bool = False
    programs: dict[str, Program] = field(default_factory=dict[str, Program])
    unlike: str = ""
    constants: set[str] | None = None
    failed: bool = False
    meets: bool = False
    in_chunks: bool = False


_earlier = WeakKeyDictionary[pl.LightningModule, dict[str, Verdict]]()
"""What earlier runs of a module have found, by strategy."""


class Views(NamedTuple):
    """How a strategy cuts batches: before they are collated, after it, or both."""

    ranks: bool
    chunks: bool


_Piece: TypeAlias = Callable[[int, int], Batch]
"""Makes a batch of the samples from i to j."""


class _Cannot(Exception):  # told, and no error
    """The module can't be verified; says why."""


@dataclass
class _Step(Seen):
    """What a step of the module has done.

    Args:
        losses: with their graphs.
        unused: whether a parameter that is trained took no part in a loss.
        weight: the `loss_weight` that it returned.
        written: what it has changed in the module, by name.
    """

    losses: list[Tensor] = field(default_factory=list[Tensor])
    unused: bool = False
    weight: Any = None
    written: dict[str, Written] = field(default_factory=dict[str, Written])


class Verifier:
    """Runs a step of a module on a few samples, whole and in parts.

    Args:
        strategy: whose module is placed on its devices, and not wrapped.
        structure: cuts a batch into chunks.
        step: name of the module's method; of a step of evaluation only what it logs is compared.
        loader: index of the one whose samples are taken.
        together: whether all ranks verify, whose steps are exchanges.
        accumulates: whether the parts are batches of one optimizer step, none of which waits for the others' numbers.
    """

    def __init__(
        self, strategy: Any, structure: BatchStructure, step: str = "training_step", loader: int = 0,
        together: bool = False, accumulates: bool = False,
    ) -> None:  # fmt: skip
        self._accumulates = accumulates
        self._module: pl.LightningModule = strategy.lightning_module
        self._name, self._structure, self._step, self._loader = strategy.strategy_name, structure, step, loader
        devices = {parameter.device for parameter in self._module.parameters()}
        # where a step expects its batch; shards are made of a module that is not on its device yet
        self._device = devices.pop() if len(devices) == 1 else self._module.device
        by_config = getattr(strategy, "is_configured", False)
        self._global_view = getattr(strategy, "global_view", None)
        self._option = "strategy.verify=false" if by_config else f"{type(strategy).__name__}(verify=False)"
        self._trains, self._together = step == "training_step", together
        trainer: Any = self._module.trainer
        self._loop = trainer.fit_loop if self._trains else trainer._evaluation_loop
        layout = getattr(strategy, "layout", None)  # not of one device, where batches are accumulated
        self._in_turn = layout is not None and layout.cut_by.startswith("num_microbatches")
        self._all_evaluates = not self._trains
        self._of_ranks = self._has_met = self._in_chunks = False
        self._rest: Sequence[Any] = ()
        self._most = _SAMPLES

    def verify(self, batch: Batch, views: Views, rest: Sequence[Any]) -> Verdict:
        """Find the plans of the losses and the programs of logged values, and compare.

        Args:
            batch: the first one of the run, for loaders whose samples can't be chosen; None if there is none.
            views: how the strategy cuts batches.
            rest: arguments of the step after the batch.
        """
        self._rest, verdict, fewer = rest, Verdict(), False
        try:
            if self._device.type == "meta":
                raise _Cannot("its parameters have no values yet")
            with torch.inference_mode(False), not_compiling(), self._quiet():
                for kind, total, piece in self._pieces(batch, views):
                    self._of_ranks = kind == "rank"
                    if total < 2:
                        raise _Cannot("its first batch has a single sample")
                    if self._trains:
                        self._compare(kind, total, piece, verdict)
                    else:
                        self._compare_values(*self._runs(total, piece), piece, verdict)
                    if verdict.refusal:
                        break
                    if self._in_turn and self._has_met and not self._of_ranks:
                        verdict.meets = True
                        verdict.refusal = (
                            f"{self._name}: training_step needs the rows of all micro-batches at once, which run one "
                            "after the other. Set num_microbatches=1."
                        )
        except PartsDiffer as exc:
            verdict.refusal = str(exc)
        except Exception as exc:  # arbitrary code, on samples of its own
            if self._trains and isinstance(exc, ConfigError):
                raise
            verdict.failed, fewer = True, self._most > 2 and is_out_of_memory(exc)
            if not fewer:
                why = str(exc) if isinstance(exc, _Cannot) else f"{self._step} fails on a few samples ({_said(exc)})"
                compared = "training" if self._trains else f"what {self._step} logs"
                line = f"{self._name}: {compared} could not be compared with one device's: {why}."
                verdict.told.append((line, False))
        if fewer:  # now that the error holds no graphs
            self._most //= 2
            return self.verify(batch, views, rest)
        verdict.in_chunks = self._in_chunks and bool(verdict.refusal)
        return verdict

    def _pieces(self, batch: Batch, views: Views) -> Iterator[tuple[str, int, _Piece]]:
        """Yield each view, with the number of samples and what makes a batch of those from i to j."""
        try:
            samples = FewSamples(self._module, self._loop, self._loader, self._most)
        except TypeError as exc:
            num = 0 if batch is None else self._structure.num_samples(batch)
            if not num:
                raise _Cannot(f"its samples can't be chosen from {exc}") from exc
            batch = move_data_to_device(batch, self._device)  # it may wait on the host
            total, split = min(num, self._most), self._structure.split
            whole = batch if total == num else split(batch, [total, num - total])[0]
            yield "chunk", total, lambda i, j: _chunk(split, whole, i, j, total)
            return
        total = samples.num
        if views.ranks:
            yield "rank", total, lambda i, j: samples.batch(i, j, self._device)
        if views.chunks:
            self._in_chunks = views.ranks
            whole, split = samples.batch(0, total, self._device), self._structure.split
            yield "chunk", total, lambda i, j: _chunk(split, whole, i, j, total)

    def _compare(self, kind: str, total: int, piece: _Piece, verdict: Verdict) -> None:
        whole, cuts = self._runs(total, piece)
        if not whole.losses:
            raise _Cannot("training_step returned no loss")
        if end_of_step(self._module) is not None:
            return None  # it computes the loss of the joined outputs
        plans = list[Plan]()
        for call in range(len(whole.losses)):
            plan, unlike_whole = self._plan(call, whole, cuts)
            plans.append(plan)
            if not unlike_whole:
                continue
            if self._is_random(call, whole, piece):
                if not self._all_evaluates:
                    self._all_evaluates = True
                    del whole, cuts  # their graphs
                    return self._compare(kind, total, piece, verdict)
                line = f"{self._name}: training_step draws random numbers, each part of a batch its own."
                verdict.told.append((line, False))
            elif whole.weight is None:
                sizes = " and ".join(str(part.num) for part in cuts[0])
                verdict.refusal = (
                    f"{self._name}: computed in {kind}s of {sizes} samples, the gradient of {unlike_whole}. Compute "
                    f"what compares samples in evener.over_batch(fn)(...), pad to a fixed length,{self._view} or set "
                    f"{self._option} to train nevertheless."
                )
            else:  # the user's word
                line = (
                    f"{self._name}: with its loss_weight, in parts of a batch, the gradient of {unlike_whole}. Return "
                    "the number that the loss is a mean over, or leave loss_weight out."
                )
                verdict.told.append((line, True))
        verdict.plans, verdict.unused = plans, verdict.unused or whole.unused
        if not verdict.refusal:
            self._compare_written(whole, cuts[0], piece, verdict)
        self._compare_values(whole, cuts, piece, verdict)
        return None

    def _runs(self, total: int, piece: _Piece) -> tuple[_Step, list[list[_Step]]]:
        """Run a step on samples, whole and in parts; in equal ones if the run has no others (`drop_last=True`)."""
        (whole,) = self._run(piece, 0, total)
        firsts = dict.fromkeys((max(1, round(total * 5 / 8)), total - 1))
        if self._of_ranks and total % 2 == 0 and parts_are_equal(self._loop):
            firsts = dict.fromkeys((total // 2,))
        cuts = list[list[_Step]]()
        for i in firsts:
            try:
                cuts.append(self._run(piece, 0, i, total))
            except Exception as exc:
                if cuts and not is_out_of_memory(exc):
                    break  # on a single sample
                rank_evaluates = self._of_ranks and not self._trains
                if rank_evaluates or isinstance(exc, (_Cannot, PartsDiffer)) or is_out_of_memory(exc):
                    raise
                if self._of_ranks:  # by which rank it runs, it fails on the whole batch too, and does so in training
                    self._run(lambda i, j: piece(0, total), 0, total, 2 * total)
                raise PartsDiffer(
                    f"{self._name}: {self._step} fails on parts of a batch ({_said(exc)}). Give every value of the "
                    "batch one row per sample, or put it into an object that defines split(sizes)."
                ) from exc
        return whole, cuts

    def _compare_values(self, whole: _Step, cuts: Sequence[Sequence[_Step]], piece: _Piece, verdict: Verdict) -> None:
        """Find how logged values that are no means over samples follow from parts; the loss has its plan."""
        found, unknown = find_programs(whole, cuts)
        losses = [n for n, (*_, value) in whole.logged.items() if any(is_loss(value, x) for x in whole.losses)]
        has_one = self._trains and self._module.automatic_optimization and not verdict.plans[0].needs_all
        if whole.weight is not None or (has_one and not self._of_ranks):  # its weights, which ranks don't have of a nan
            found = {n: program for n, program in found.items() if n not in losses}
        unknown = [n for n in unknown if n not in losses]
        of_losses = enumerate(plan.program for plan in verdict.plans)
        verdict.programs |= found | {f"{LOSS} {i}": program for i, program in of_losses if program is not None}
        pieces = [whole, *(step for cut in cuts for step in cut)]
        constants = {n for n in whole.logged if len({str(p.logged[n][1]) for p in pieces if n in p.logged}) == 1}
        verdict.constants = {n for n in constants if isinstance(whole.logged[n][1], int)}
        if unknown:  # or random
            again = self._run(piece, 0, whole.num, seed=2)[0].logged
            unknown = [n for n in unknown if n in again and str(again[n][0]) == str(whole.logged[n][0])]
        if unknown:
            verdict.unlike = (
                f"{self._name}: {self._step} logs {', '.join(map(repr, unknown))}, of which values of parts of a batch "
                "don't make one device's value; they are averaged by samples. Use a metric of torchmetrics."
            )

    def _plan(self, call: int, whole: _Step, cuts: Sequence[Sequence[_Step]]) -> tuple[Plan, str]:
        """The plan by which parts train as the whole; if there is none, one, and which gradient differs by how much."""
        parameters, loss, given = _small_parameters(self._module), whole.losses[call], whole.weight is not None
        if not (loss.requires_grad and parameters):
            return OF_SAMPLES, ""
        if loss.grad_fn is None and self._of_ranks:
            return OF_SAMPLES, "the loss is computed by hooks, in passes that no rank joins in"
        name = f"{LOSS} {call}"
        plans = [OF_SAMPLES] if given else proposals(whole, cuts, name)
        if self._accumulates:
            plans = [plan for plan in plans if not plan.needs_all]
        expected, unlike_whole, last = self._gradients([loss], [1.0], parameters), list[tuple[float, str]](), OF_SAMPLES
        for last in plans:
            try:
                found = max(self._differs(call, cut, last, expected, parameters) for cut in cuts)
            except (RuntimeError, IndexError) as exc:  # gradients don't go through the program
                if is_out_of_memory(exc):
                    raise
                continue
            if found[0] <= _tolerance(loss, parameters):
                return last, ""
            unlike_whole.append(found)
        if not unlike_whole:
            return last, "the loss has no counterpart in each part"
        difference, name = min(unlike_whole)
        by = "is not a number" if difference == float("inf") else f"differs from one device's by {difference:.1%}"
        return last, f"{name} {by}"

    def _differs(
        self, call: int, cut: Sequence[_Step], plan: Plan, expected: Sequence[Tensor], parameters: Sequence[Any]
    ) -> tuple[float, str]:
        """By how much the gradient of the parameter differs that differs most, and its name."""
        parts, weights = list[Part](), list[Any]()
        for step in cut:
            weights.append(step.num if step.weight is None else float(step.weight))  # of integers: a ratio in float32
            if plan.program is not None:
                parts.append(Part(step.losses[call], plan, step.num, step.tape))
                weights[-1] = parts[-1].weight
        shares = [ratio(weight, sum(weights)) for weight in weights]
        try:
            for part, share in zip(parts if plan.needs_all else (), shares, strict=False):
                part.scale(part.program.merged([one.rows for one in parts]), float(share))
            found = self._gradients([step.losses[call] for step in cut], shares, parameters)
        finally:
            for handle in (handle for part in parts for handle in part.handles):
                handle.remove()
        names = {id(p): name for name, p in self._module.named_parameters()}
        of_all = (names.get(id(p), "a parameter") for p in parameters)
        return max(zip(_differences(expected, found), of_all, strict=True))

    def _gradients(self, losses: Sequence[Tensor], shares: Sequence[Any], parameters: Sequence[Any]) -> list[Tensor]:
        """The gradients as hooks on parameters leave them: under ranks they get each part's, else the whole batch's."""
        with nullcontext() if self._of_ranks else without_hooks(parameters):
            return _gradients(losses, shares, parameters)

    def _is_random(self, call: int, whole: _Step, piece: _Piece) -> bool:
        """Whether the step gives other gradients with other random numbers."""
        parameters = _small_parameters(self._module)
        (again,) = self._run(piece, 0, whole.num, seed=2)
        one, two = (self._gradients([step.losses[call]], [1.0], parameters) for step in (whole, again))
        return max(_differences(one, two)) > _tolerance(whole.losses[call], parameters)

    @property
    def _view(self) -> str:
        """What trains the module as it is, where that was switched off, or where it is known too late."""
        option = self._option.replace("verify=", "global_view=")
        if self._global_view is False:
            return f" leave out {option},"
        option = option.replace("false", "true").replace("False", "True")
        return f" set {option}, which is exact but slower," if self._name in ("ddp", "fsdp") and self._of_ranks else ""

    def _compare_written(self, whole: _Step, parts: Sequence[_Step], piece: _Piece, verdict: Verdict) -> None:
        """Refuse what a step leaves in the module otherwise in parts, if checkpoints hold it or later steps read it."""
        steps, parameters = (whole, *parts), dict(self._module.named_parameters())
        names = sorted({name for step in steps for name in step.written})
        in_turn = [name for name in names if name in parameters] if self._in_turn else []
        found = [name for name in names if _is_unlike([step.written.get(name) for step in steps])]
        saved = [name for name in found if any(name in step.written and step.written[name].is_saved for step in steps)]
        read = found[:1] if found and not (in_turn or saved) and self._reads(steps, piece) else []
        for name in [*in_turn, *saved, *read][:1]:
            instead = "num_microbatches=1" if in_turn else f"{self._option} to keep a part's"
            verdict.refusal = (
                f"{self._name}: training_step changes {name} by the samples of its part of a batch, unlike one device. "
                "Gather what it is computed of (self.all_gather), update it in on_train_batch_end, or set "
                f"{instead}."
            )

    def _reads(self, steps: Sequence[_Step], piece: _Piece) -> bool:
        """Whether a step computes otherwise with what one of some steps has left in the module than with another's."""
        found = list[list[Tensor]]()
        for step in steps:
            with suppress(Exception):  # a state of other samples may not fit these
                (again,) = self._run(piece, 0, steps[0].num, given=list(step.written.values()))
                found.append(self._gradients(again.losses, [1.0] * len(again.losses), _small_parameters(self._module)))
        return any(max(_differences(found[0], other)) > 1e-6 for other in found[1:])

    @contextmanager
    def _quiet(self) -> Generator[None]:
        """Have the step's own warnings and gradients leave no trace."""
        before = [(p, p.grad, p.requires_grad) for p in self._module.parameters()]
        try:
            yield
        finally:
            for parameter, gradient, is_trained in before:
                parameter.grad = gradient
                parameter.requires_grad_(is_trained)

    def _run(self, piece: _Piece, *places: int, seed: int = 1, given: Sequence[Written] = ()) -> list[_Step]:
        """Run the step on the samples between each two places, as parts that may meet.

        Args:
            given: what the module is given first.
        """
        spans, module = list(itertools.pairwise(places)), self._module
        parts = [(j - i, piece(i, j)) for i, j in spans]
        ranks, steps = SimulatedRanks(len(spans) if self._of_ranks else 1), [_Step(num) for num, _ in parts]
        trained = [p for p in module.parameters() if p.requires_grad]  # a toggled optimizer freezes some meanwhile

        def here() -> _Step:
            place = seat()
            return steps[0 if place is None else place.part]

        def samples() -> tuple[float, float]:
            return here().num, places[-1]

        def backward(loss: Tensor) -> None:
            log(f"{LOSS} {len(here().losses)}", loss)
            here().losses.append(loss)
            here().unused |= _leaves_out(loss, trained)

        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            options.update(zip(LOG_OPTIONS, args, strict=False))
            if options.get("reduce_fx", "mean") in ("mean", torch.mean):
                here().tape.log(name, value)
                kept = value.detach().clone() if isinstance(value, Tensor) else value
                here().logged[name] = kept, options.get("batch_size"), value

        def run(batch: Batch) -> None:
            alone = nullcontext() if self._together else _OneRank()
            with alone, here().tape:
                output: Any = getattr(module, self._step)(batch, *self._rest)
                output = ended(module, output) if self._trains else output
            if not self._of_ranks and hooks != _hooks(module):
                raise PartsDiffer(
                    f"{self._name}: {self._step} registers or removes hooks, as each part of a batch would. Register "
                    "them in __init__, setup or on_fit_start."
                )
            here().weight = weight_in(output)
            loss = output.get("loss") if isinstance(output, dict) else output
            if module.automatic_optimization and isinstance(loss, Tensor):
                backward(loss)
            if state is not None:
                here().written = state.changes()
                state.reset(here().written)

        with ExitStack() as stack:
            stack.enter_context(seeded(seed, self._device))
            stack.enter_context(trial_step(module, evaluates=self._all_evaluates))  # restores all attributes
            stack.enter_context(received((module_log(part), log) for part in lightning_modules(module)))
            stack.enter_context(torch.enable_grad())
            for part in module.modules() if not self._all_evaluates else ():
                part.training = part.training and not _draws(part)
            state, hooks = None if self._together else ModuleState(module), _hooks(module)
            if state is not None:
                stack.callback(state.close)
                stack.enter_context(simulating(ranks))
            for one in given:
                one.put()
            if not module.automatic_optimization:
                _hold_optimizers(module, backward, stack)
            for metric in outermost_metrics(list(module.children())) if len(parts) > 1 and not self._of_ranks else ():
                stack.callback(OfParts(metric, samples, self._name).remove)
            pieces = [Piece(self._device, f"{num} samples", partial(run, batch)) for num, batch in parts]
            with _Parts(pieces, [num for num, _ in parts], state) as meeting:
                for part in meeting.pieces:
                    part.call()
            self._has_met |= meeting.has_met
        return steps


class _Parts(Meeting):
    """Parts that meet in one module as in one of each: what a part has written to it is put aside meanwhile."""

    def __init__(self, pieces: Sequence[Piece], sizes: Sequence[float], state: ModuleState | None) -> None:
        super().__init__(pieces, sizes)
        self._state = state

    @override
    def meet(self, part: int, where: str, value: Any, combine: Combine) -> Any:
        if self._state is None:
            return super().meet(part, where, value, combine)
        written = self._state.changes()
        self._state.reset(written)
        answer = super().meet(part, where, value, combine)
        for one in written.values():
            one.put()
        return answer


def _is_unlike(written: Sequence[Written | None]) -> bool:
    first, *others = written
    return any(first is None or one is None or unlike(first.contents, one.contents) for one in others)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def _gradients(losses: Sequence[Tensor], shares: Sequence[Any], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The sum of the gradients of losses, each times its share."""
    total = [
        torch.zeros_like(p, dtype=torch.float64 if p.dtype is torch.float64 else torch.float32) for p in parameters
    ]
    for loss, share in zip(losses, shares, strict=True):
        if not loss.requires_grad:
            continue
        weighed = torch.where(share != 0, loss * share, 0.0) if isinstance(share, Tensor) else loss * share
        found: Sequence[Tensor | None] = ()
        with suppress(RuntimeError):  # reentrant checkpoints go backward no other way
            found = torch.autograd.grad(weighed, parameters, allow_unused=True, retain_graph=True)
        # nor do hooks that compute gradients
        if all(one is None for one in found):  # pyright: ignore[reportUnnecessaryComparison]  # of what is unused
            for parameter in parameters:
                parameter.grad = None
            weighed.backward(retain_graph=True)
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


def _tolerance(loss: Tensor, parameters: Sequence[Tensor]) -> float:
    eps = max(torch.finfo(one.dtype).eps for one in (loss, *parameters))
    return _EXACT if eps < 1e-12 else max(_CLOSE, 16 * eps)


def _differences(expected: Sequence[Tensor], found: Sequence[Tensor]) -> list[float]:
    """By how much each gradient differs, relative to the largest number in those expected."""
    largest = max((float(one.abs().max()) for one in expected if one.numel()), default=0.0) or 1.0
    pairs = zip(expected, found, strict=True)
    return [_largest(one - two) / largest if one.numel() else 0.0 for one, two in pairs]


def _largest(values: Tensor) -> float:
    """The largest absolute value; infinity if it is not known."""
    found = float(values.abs().max())
    return found if found == found else float("inf")  # nan is no number that another one exceeds


def _hooks(module: nn.Module) -> list[int]:
    """The numbers of the hooks of a module, of those in it, and of its parameters."""
    owners = (*module.modules(), *module.parameters())
    return [number for owner in owners for hooks in hooks_of(owner) for number in hooks if isinstance(number, int)]


def _draws(module: nn.Module) -> bool:
    """Whether a layer may draw random numbers in training, or see other samples, and computes in evaluation alike."""
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0
    if isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return True
    return not any(True for _ in module.children())


def _chunk(split: Callable[..., Sequence[Batch]], whole: Batch, i: int, j: int, total: int) -> Batch:
    """The samples from i to j of a batch; what cuts itself may leave out a chunk without samples."""
    return split(whole, [n for n in (i, j - i, total - j) if n])[bool(i)] if j - i < total else whole


def _leaves_out(loss: Tensor, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether a parameter takes no part in a loss, as far as its graph shows."""
    reached, left, seen = set[int](), [loss.grad_fn], set[Any]()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "CheckpointFunction" in node.name():  # reentrant: hides what it computes
            return False
        reached.add(id(getattr(node, "variable", None)))
        left += [child for child, _ in node.next_functions]
    return any(id(p) not in reached for p in parameters)


def _hold_optimizers(module: pl.LightningModule, backward: Callable[[Tensor], None], stack: ExitStack) -> None:
    """Have `manual_backward` note its losses, and optimizers and schedulers do nothing, inside a stack of contexts."""

    def manual_backward(_: Any, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        backward(loss)

    strategy: Any = module.trainer.strategy
    optimizers, configs = strategy.optimizers, strategy.lr_scheduler_configs
    still = partial(_answered, None)
    replaced: dict[str, Callable[..., Any]] = {"manual_backward": manual_backward, "clip_gradients": still}
    if not optimizers:  # before the strategy makes them
        optimizers, configs = _init_optimizers_and_lr_schedulers(module)
        replaced |= {"toggle_optimizer": still, "untoggle_optimizer": still}
    for name, own in ("optimizers", optimizers), ("lr_schedulers", [config.scheduler for config in configs]):
        answers = [_Still(one) for one in own]
        replaced[name] = partial(_answered, answers[0] if len(answers) == 1 else answers or None)
    for name, call in replaced.items():
        stack.callback(Replacement(module, name, call).remove)


def _answered(answer: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what is known, in place of a method's result."""
    return answer


class _Still:
    """An optimizer, or a scheduler, that never steps."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Call the closure, as an optimizer does."""
        return closure() if callable(closure) else None

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Keep gradients."""

    def toggle_model(self, *args: Any, **kwargs: Any) -> Any:
        """Keep what requires gradients."""
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        """Everything else is the optimizer's own."""
        return getattr(self._own, name)


class _OneRank(TorchDispatchMode):
    """Refuses collectives: only rank 0 computes."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise _Cannot("training_step communicates with other ranks")
        return func(*args, **(kwargs or {}))

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True


def verified(
    strategy: Any, views: Views, verifies: bool, args: Sequence[Any],
    share: Callable[[Any], Any] = lambda found: found, is_first: bool = True, structure: BatchStructure | None = None,
    again: bool = False,
) -> Verdict:  # fmt: skip
    """Find by what the losses of a strategy's module divide, before its first step.

    Args:
        views: how the strategy cuts batches.
        verifies: whether a module that trains otherwise than on one device is refused.
        args: arguments of the first training step.
        share: gives all ranks what the first has found.
        is_first: whether this is the first rank.
        structure: cuts batches, of accumulated ones; None for the strategy's.
        again: whether a module that can't be compared yet will be tried again.

    Raises:
        PartsDiffer: the module trains otherwise; the message says what differs.
    """
    verdict: Verdict | None = None
    if is_first:
        try:
            own = structure or strategy.structures.of_batch(strategy.lightning_module.trainer)
            verifier = Verifier(strategy, own, accumulates=structure is not None)
        except PartsDiffer as exc:  # batches that can't be cut, of which the other ranks have yet to learn
            return _told(share(Verdict([], str(exc))), is_first)
        verdict, earlier = verifier.verify(args[0], views, args[1:]), _earlier.setdefault(strategy.lightning_module, {})
        if verdict.failed:  # its parameters may be shards by now
            verdict = earlier.get(strategy.strategy_name, verdict)
        earlier[strategy.strategy_name] = verdict
    found: Verdict = share(verdict)
    return found if found.failed and again else _told(found, is_first, verifies or not found.plans)


def _told(found: Verdict, is_first: bool, verifies: bool = True) -> Verdict:
    """Say what was found, and refuse what differs."""
    for line, warns in found.told if is_first and verifies else ():
        (rank_zero_warn if warns else rank_zero_info)(line)
    if found.unlike and is_first and verifies:
        rank_zero_warn(found.unlike)
    if found.refusal and (verifies or found.meets):
        refusal = PartsDiffer(found.refusal)
        refusal.plans, refusal.in_chunks = found.plans or None, found.in_chunks
        raise refusal
    return found


def find_evaluated(
    strategy: Any,
    views: Views,
    share: Callable[[Any], Any] = lambda found: found,
    is_first: bool = True,
    together: bool = False,
    whole: WholeSteps | None = None,
) -> None:
    """Find, before the first pass of an evaluation, how what it logs follows from parts; see `verified`.

    Args:
        whole: gives steps whole batches where it doesn't.
    """
    whole = whole or WholeSteps()
    module, values = strategy.lightning_module, strategy.contract.reader.values
    if module.trainer.predicting or not any(views):
        return
    num_loaders = module.trainer._evaluation_loop.num_dataloaders
    step = "test_step" if module.trainer.testing else "validation_step"
    takes_index = is_param_in_hook_signature(getattr(module, step), "batch_idx", min_args=2)
    for loader in range(num_loaders):
        if (step, loader) in values.programs or step in whole.names:
            continue
        verdict: Verdict | None = None
        if is_first:
            structure, rest = strategy.structures.of_batch(module.trainer, loader), (0,) * takes_index
            rest += (loader,) * (num_loaders > 1)
            verdict = Verifier(strategy, structure, step, loader, together).verify(None, views, rest)
        found = share(verdict)
        if found.unlike and whole.allowed and not views.ranks:
            found.refusal, found.unlike = found.refusal or found.unlike, ""
        with whole.where_needed(step):
            _told(found, is_first)
        values.learn(step, loader, found.programs, found.constants)
