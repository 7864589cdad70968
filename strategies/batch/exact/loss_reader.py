"""Give the losses of parts of a batch the gradients that they have in the whole batch's loss.

A loss is a program of leaves, f(l_1, ..., l_n). With m_j leaf j of the whole batch, the gradient that enters leaf j of
part p is df/dl_j(m) * w_pj: its fraction of a mean, 1 for a sum, its share for what is alike in all parts.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ...core.devices import precise_dtype
from ...core.errors import ConfigError, PartsDiffer
from ..results import FOUND, weight_in
from .programs import RETURNED, Tape
from .verdict import OF_SAMPLES, Plan, Values

Gradients: TypeAlias = tuple[Tensor | None, ...]


class Part:
    """The loss of one part of a batch, of `num` samples, before its backward pass; 0 counts nothing of it.

    `rows` are the leaves of the loss, by the tape of the step; `handles` those of hooks on its graph.
    """

    num_hooks: ClassVar[int] = 0
    """How many hooks all parts have registered on nodes of graphs; torch counts them with those of modules."""

    def __init__(self, loss: Tensor, plan: Plan, num: float, tape: Tape) -> None:
        self.plan, self.loss, self.num = plan, loss, num
        self.handles: list[Any] = []
        if plan.program is not None:
            rows = tape.rows(plan.program, loss.device)
            self.rows = rows if num else torch.zeros_like(rows)
            nodes = {j: tape.found(leaf) for j, leaf in enumerate(plan.program.leaves) if leaf.grad}
            self._numbers = {j: found[1] for j, found in nodes.items() if found is not None}

    @property
    def weight(self) -> Tensor | float:
        """What the whole loss counts by."""
        if self.plan.program is None or self.plan.base is None:
            return self.num
        row = self.rows.split(self.plan.program.sizes)[self.plan.base]
        return row[1 if self.plan.program.leaves[self.plan.base].how == "mean" else 2]

    def guard(self) -> None:
        """Have no gradient enter the leaves of a part that counts nothing: what divides by 0 makes nan of a 0."""
        weight = torch.as_tensor(self.weight)
        if weight.is_cpu and weight != 0:  # elsewhere to ask would wait
            return
        for node in self._leaves().values():
            self._keep(node, partial(_none_without, weight))

    def scale(self, merged: Tensor, share: float) -> None:
        """Put the whole batch's gradients of its leaves in the place of the part's, whose loss counts by its share."""
        assert self.plan.program is not None
        upstream, nodes, program = list[Tensor | None](), self._leaves(), self.plan.program
        self._keep(self.loss.grad_fn, partial(_noted, upstream))
        rows = zip(program.leaves, self.rows.split(program.sizes), merged.split(program.sizes), strict=True)
        slopes = program.slopes(merged)
        for j, (leaf, own, whole) in enumerate(rows):
            if j in slopes and j in nodes:
                slope = slopes[j] * (share if leaf.how == "same" else 1.0)
                if leaf.how == "mean":
                    slope = torch.where(own[1] == 0, 0.0, slope * own[1] / whole[1])
                self._keep(nodes[j], partial(_put, upstream, slope, share, -1 - leaf.slot))

    def _keep(self, node: Any, hook: Any) -> None:
        self.handles.append(node.register_prehook(hook))
        Part.num_hooks += 1

    def _leaves(self) -> dict[int, Any]:
        """The nodes of the graph that have computed the leaves, found by torch's numbers of them."""
        wanted = set(self._numbers.values())
        found = {node._sequence_nr(): node for node in graph(self.loss, wanted) if node._sequence_nr() in wanted}
        return {j: found[number] for j, number in self._numbers.items() if number in found}


def graph(loss: Tensor, ends: "set[int] | None" = None) -> Iterator[Any]:
    """Yield the nodes of a loss's graph, each once, not below those of the numbers `ends`, or where parts meet."""
    seen, left, missing = set[Any](), [loss.grad_fn], set(ends or ())
    while left and (ends is None or missing):
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        missing.discard(node._sequence_nr())
        if ends is None or not (node._sequence_nr() in ends or "OverBatch" in node.name()):
            left += [child for child, _ in node.next_functions]


class LossReader:
    """Follows the plan of a run's losses, and `values`, how those logged follow; `strategy` begins messages."""

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self.plan, self.values = OF_SAMPLES, Values()
        self.parts: list[Part] = []  # of the step in hand
        self.merged: Tensor | None = None  # the leaves of the global batch's loss, if it is no mean of those of parts
        self.counts = True
        self.num_whole: float | None = None  # samples of the global batch, unless all of them are here
        self.sum_over_ranks: Callable[[Tensor], Tensor] | None = None  # of a tensor of shape (n,); all ranks call it
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
        self.counts, self.num_whole, self.merged, self.parts = counts, num_whole, None, []

    def reading(self, step: Callable[..., Any], num: float) -> Callable[..., Any]:
        """Return a step that reads its loss, of `num` samples, once it is known.

        It raises ConfigError where the loss is computed otherwise than in the run's first step, as far as is known
        without waiting; PartsDiffer in one process, which goes on with whole batches.
        """
        return step if self.plan.is_of_samples else partial(self._read, step, num)

    def _read(self, step: Callable[..., Any], num: float, *args: Any, **kwargs: Any) -> Any:
        plan, active = self.plan, [one for one in _get_current_dispatch_mode_stack() if isinstance(one, Tape)]
        assert plan.program is not None
        eagerly = nullcontext() if self._is_seen else torch.compiler.set_stance("force_eager")
        with eagerly, nullcontext(active[-1]) if active else Tape({RETURNED: plan.program}) as tape:
            output = step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor) or weight_in(output) is not None:
            return output
        part = Part(loss, plan, num if self.counts else 0, tape)
        if self.counts and loss.is_cpu and not plan.program.fits(part.rows, loss.detach()):
            self.plan, is_alone = OF_SAMPLES, self.sum_over_ranks is None
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
        none = torch.zeros(sum(program.sizes), dtype=precise_dtype(device), device=device)
        merged = program.merged(torch.stack([part.rows.to(none) for part in self.parts] or [none]))
        self.merged = merged if self.sum_over_ranks is None else self.sum_over_ranks(merged)
        whole = self.num_whole or sum(part.num for part in self.parts)
        for part in self.parts:
            part.scale(self.merged, part.num / whole)


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
