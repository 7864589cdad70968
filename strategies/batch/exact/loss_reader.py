"""Give the losses of parts of a batch the gradients that they have in the whole batch's loss.

A loss is a program (`programs.py`) of numbers that reduce the batch, its leaves: L = f(l_1, ..., l_n). With m_j leaf j
of the whole batch, merged of those of the parts, the gradient that enters leaf j of part p is df/dl_j(m) * w_pj, where
w_pj is the part's fraction of a mean, 1 for a sum, its share for what all parts have alike.

by samples     a mean over samples: nothing is read in a step
one weight     the whole loss counts by one leaf, as by a `loss_weight`: beside the loss, under the key `FOUND`
all leaves     the loss counts by samples, and the gradients of its leaves are put in their place (`Part.scale`)

That a plan is right is not decided here but by gradients, in `step_comparison.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor

from ...core.devices import precise_dtype
from ...core.errors import ConfigError, PartsDiffer
from ..results import FOUND, weight_in
from .programs import RETURNED, Program
from .tape import Tape, active_tape
from .verdict import OF_SAMPLES, Plan, Values

Gradients: TypeAlias = tuple[Tensor | None, ...]


class Part:
    """The loss of one part of a batch.

    Args:
        loss: of shape (), before its backward pass.
        num: samples of the part; 0 counts nothing of it.
        tape: of the step.

    Attributes:
        rows: the leaves of the loss.
    """

    num_hooks: ClassVar[int] = 0
    """How many hooks all parts have registered on nodes of graphs; torch counts them with those of modules."""

    def __init__(self, loss: Tensor, plan: Plan, num: float, tape: Tape) -> None:
        self.plan, self.loss, self.num = plan, loss, num
        self.program = program = plan.program or Program((), ())
        self.rows = [row if num else torch.zeros_like(row) for row in tape.rows(program, loss.device)]
        self._numbers = tape.numbers(program)
        self.handles: list[Any] = []
        """Hooks on the graph, which go with it."""

    @property
    def weight(self) -> Tensor | float:
        """What the whole loss counts by."""
        if self.plan.base is None:
            return self.num
        row = self.rows[self.plan.base]
        return row[1] if self.program.leaves[self.plan.base].how == "mean" else row[2]

    def guard(self) -> None:
        """Have no gradient enter the leaves of a part that counts nothing: what divides by 0 makes nan of a 0."""
        weight = torch.as_tensor(self.weight)
        if weight.is_cpu and weight != 0:  # elsewhere to ask would wait
            return
        for node in self._nodes().values():
            self._keep(node, partial(_none_without, weight))

    def scale(self, merged: Sequence[Tensor], share: float) -> None:
        """Put the whole batch's gradients of the leaves in the place of the part's; call it before backward.

        Args:
            merged: the leaves of the whole batch.
            share: what the loss of this part is multiplied by in the whole batch's.
        """
        upstream, nodes = list[Tensor | None](), self._nodes()
        self._keep(self.loss.grad_fn, partial(_noted, upstream))
        for j, slope in self.program.slopes(merged).items():
            leaf = self.program.leaves[j]
            if j not in nodes:
                continue
            own = slope * (share if leaf.how == "same" else 1.0)
            if leaf.how == "mean":
                by = self.rows[j][1]
                own = torch.where(by == 0, 0.0, slope * by / merged[j][1])
            self._keep(nodes[j], partial(_put, upstream, own, share, -1 - leaf.slot))

    def _keep(self, node: Any, hook: Any) -> None:
        self.handles.append(node.register_prehook(hook))
        Part.num_hooks += 1

    def _nodes(self) -> dict[int, Any]:
        """The nodes of the graph that have computed the leaves, found by torch's numbers of them."""
        found, wanted = dict[int, Any](), set(self._numbers.values())
        for node in graph(self.loss, wanted):
            if node._sequence_nr() in wanted:
                found[node._sequence_nr()] = node
                if len(found) == len(wanted):
                    break
        return {j: found[number] for j, number in self._numbers.items() if number in found}


def graph(loss: Tensor, ends: "set[int] | None" = None) -> Iterator[Any]:
    """Yield the nodes of a loss's graph, each once, not below those of the numbers `ends`, or where parts meet."""
    seen, left = set[Any](), [loss.grad_fn]
    while left:
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if ends is None or not (node._sequence_nr() in ends or "OverBatch" in node.name()):
            left += [child for child, _ in node.next_functions]


class LossReader:
    """Follows the plans of a run's losses.

    Args:
        strategy: name that begins messages.

    Attributes:
        plan: of the loss that a step returns.
        parts: of the step in hand.
        merged: the leaves of the global batch's loss, where it is no mean of those of parts.
        counts: whether this process has samples of the batch.
        num_whole: samples of the global batch; None if all of them are here.
        values: how logged values follow from those of parts.
        sum_over_ranks: sums a tensor of shape (n,) over the ranks, each of which calls it; None for one process.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self.plan = OF_SAMPLES
        self.parts: list[Part] = []
        self.merged: list[Tensor] | None = None
        self.counts = True
        self.num_whole: float | None = None
        self.values = Values()
        self.sum_over_ranks: Callable[[Tensor], Tensor] | None = None
        self._is_seen = True

    def take(self, plan: Plan, module: Any) -> None:
        """Follow this plan of a module's losses from now on."""
        self.plan = plan
        # what a loss is computed of is not seen where the step itself is compiled
        self._is_seen = self.plan.is_of_samples or getattr(module, "_compiler_ctx", None) is None
        if not self._is_seen:
            rank_zero_info(
                f"{self._strategy}: training steps run uncompiled, since what their loss divides by can't be read in a "
                'compiled step. Compile the model inside the module, or return {"loss": loss, "loss_weight": n}.'
            )

    def begin_step(self, counts: bool = True, num_whole: float | None = None) -> None:
        """Begin a step on another batch."""
        self.counts, self.num_whole, self.merged = counts, num_whole, None
        if self.parts:
            self.parts = []

    def reading(self, step: Callable[..., Any], num: float) -> Callable[..., Any]:
        """Return a step that reads its loss, of `num` samples, once it is known.

        Raises:
            ConfigError: it is computed otherwise than in the run's first step, as far as is known without waiting.
        """
        return step if self.plan.is_of_samples else partial(self._read, step, num)

    def _read(self, step: Callable[..., Any], num: float, *args: Any, **kwargs: Any) -> Any:
        plan, tape = self.plan, active_tape()
        assert plan.program is not None
        eagerly = nullcontext() if self._is_seen else torch.compiler.set_stance("force_eager")
        with eagerly, nullcontext(tape) if tape is not None else Tape({RETURNED: plan.program}) as recording:
            output = step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor) or weight_in(output) is not None:
            return output
        part = Part(loss, plan, num if self.counts else 0, recording)
        if self.counts and loss.is_cpu and not plan.program.fits(part.rows, loss.detach()):
            self.plan, is_alone = OF_SAMPLES, self.sum_over_ranks is None  # which goes on with whole batches
            raise (PartsDiffer if is_alone else ConfigError)(
                f"{self._strategy}: the loss is computed otherwise than in the first step, so what it divides by is "
                'not known. Use evener.mean, or return {"loss": loss, "loss_weight": n} from training_step.'
            )
        self.parts.append(part)
        if plan.needs_all:
            return output
        part.guard()
        return {**(output if isinstance(output, dict) else {}), "loss": loss, FOUND: part.weight}

    @property
    def whole(self) -> Tensor | None:
        """The loss of the global batch, where it is no mean of those of parts; None where it is."""
        return None if self.merged is None or self.plan.program is None else self.plan.program.value(self.merged)

    def scale(self) -> None:
        """Put the batch's gradients in the place of parts', before these go backward; all ranks call it."""
        program = self.plan.program
        if program is None or not self.plan.needs_all:
            return
        device = self.parts[0].loss.device if self.parts else torch.device("cpu")
        rows = [part.rows for part in self.parts] or [[torch.zeros(size) for size in program.sizes]]
        merged = program.merged(rows, device)
        if self.sum_over_ranks is not None:
            packed = torch.cat([row.to(precise_dtype(row.device)) for row in merged])
            merged = list(self.sum_over_ranks(packed).split(program.sizes))
        self.merged = merged
        whole = self.num_whole or sum(part.num for part in self.parts)
        for part in self.parts:
            part.scale(merged, part.num / whole)


def _noted(upstream: list[Tensor | None], gradients: Gradients) -> None:
    upstream[:] = gradients[:1]


def _none_without(weight: Tensor, gradients: Gradients) -> Gradients:
    return tuple(
        None if one is None else torch.where(weight.to(one.device) == 0, torch.zeros_like(one), one)
        for one in gradients
    )


def _put(upstream: list[Tensor | None], gradient: Tensor, share: float, k: int, gradients: Gradients) -> Gradients:
    """The gradient of a leaf in the whole batch's loss, of which this part's is multiplied by its share."""
    (own,) = upstream
    assert own is not None
    found = gradient * own.to(gradient) / share if share else torch.zeros_like(gradient)
    return tuple(
        found.to(one.device, one.dtype).reshape(one.shape) if j == k and one is not None else one
        for j, one in enumerate(gradients)
    )
