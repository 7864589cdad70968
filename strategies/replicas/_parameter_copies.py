"""Copies of parameters in the graph of the root's: a backward pass through replicas ends at the root's parameters.

    loss ┬─ the root's part ──────────────────────┬─ the root's parameters: hooks, DDP's reducer, accumulation
         └─ a replica's part ─ copies ─ one node ─┘
                                        sums the gradients of all replicas, on the root's device

The copies of a bucket of parameters, on all devices, are the outputs of one node, which is made once: later values are
written to the same copies. So autograd knows all that there is to know, and nothing else needs to know of replicas.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from ..core.devices import buckets, current_stream, flattened, has_streams, is_accelerator, unflattened
from ..core.side_streams import beside, finish_beside, finish_copy, start_copy, work_so_far

BUCKET_BYTES = 2**25
"""Bytes of gradients moved to the root in one transfer."""


@dataclass
class Gate:
    """Whether the gradients of a backward pass reach the root: what a step goes backward through itself stays apart."""

    is_open: bool = True


class ParameterCopy(nn.Parameter):
    """A replica's copy of a parameter. It is not a leaf of the graph, but can be frozen and unfrozen as one.

    Gradients, and the hooks that see them, are the root's.
    """

    grad = None  # pyright: ignore[reportAssignmentType, reportIncompatibleUnannotatedOverride]
    original: Tensor
    gate: Gate

    @property
    def requires_grad(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether operations on the copy are recorded, so that the root's parameter gets their gradients."""
        return not self.is_leaf

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @override
    def requires_grad_(self, requires_grad: bool = True) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if requires_grad and self.is_leaf:
            _follow([self.original], [[self]], self.gate)
        elif not requires_grad:
            self.detach_()
        return self

    @override
    def register_hook(self, hook: Any) -> RemovableHandle:
        return RemovableHandle(OrderedDict())  # not called

    register_post_accumulate_grad_hook = register_hook  # pyright: ignore[reportAssignmentType]

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return memo.setdefault(id(self), nn.Parameter(self.detach().clone(), self.requires_grad))

    @override
    def __reduce_ex__(self, proto: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(proto)  # pickled, it is a leaf


def copied(parameter: Tensor, device: torch.device, gate: Gate) -> Tensor:
    """Copy a parameter to a device; `follow` makes the copy one whose gradients are the parameter's."""
    values = parameter.detach().to(device, copy=True)
    if type(parameter) is not nn.Parameter:
        return nn.Parameter(values, requires_grad=False)
    made = ParameterCopy(values, requires_grad=False)
    vars(made).update(vars(parameter))  # a tensor may keep state of its own there
    made.original, made.gate = parameter, gate
    return made


def follow(
    parameters: Sequence[Tensor], copies: Sequence[Sequence[Tensor]], gate: Gate, one_by_one: bool = False
) -> None:
    """Give the gradients of copies to the parameters, as far as these are trained.

    Args:
        copies: those of each replica, in the order of the parameters.
        gate: looked at in each backward pass.
        one_by_one: whether each parameter has a node of its own, so that it takes part in a backward pass only if the
            loss depends on it; where a bundle of them takes part, some may get no gradient, and stay as they are.
    """
    for copy in (copy for own in copies for copy in own):
        copy.detach_()
    trained = [i for i, parameter in enumerate(parameters) if parameter.requires_grad]
    alone = [i for i in trained if one_by_one or parameters[i]._backward_hooks]  # hooks would be called with None
    others = [i for i in trained if i not in alone]
    bundles = buckets([parameters[i] for i in others], BUCKET_BYTES)
    for numbers in (*([i] for i in alone), *([others[place] for place in bundle] for bundle in bundles)):
        _follow([parameters[i] for i in numbers], [[own[i] for i in numbers] for own in copies], gate)


def _follow(parameters: Sequence[Tensor], copies: Sequence[Sequence[Tensor]], gate: Gate) -> None:
    root, given = parameters[0].device, [copy for own in copies for copy in own]
    # values stay, and graphs of this step may have saved them
    as_they_were = torch.autograd._unsafe_preserve_version_counter(tuple(given))
    with torch.inference_mode(False), torch.enable_grad(), as_they_were:
        if has_streams(root):
            parameters = _Arrival.apply(*parameters)
        made = _Copies.apply(gate, root, len(parameters), *parameters, *given)
    for node in {copy.grad_fn for copy in made}:
        node._set_sequence_nr(2**63 - 1)  # the engine runs it as soon as it can


class _Copies(torch.autograd.Function):
    """Parameters, and their copies, which have the same values already."""

    @staticmethod
    def forward(ctx: Any, gate: Gate, root: torch.device, num: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        copies = tensors[num:]
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(*copies)
        ctx.gate, ctx.root, ctx.num = gate, root, num
        ctx.device = next((copy.device for copy in copies if is_accelerator(copy.device)), root)
        return copies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        sums: dict[int, Tensor] = {}
        if _is_asked_for(ctx) or ctx.gate.is_open:
            # the engine has had the stream of the first accelerator among the copies' wait for all gradients
            ready = work_so_far(ctx.device)
            for start in range(0, len(grad_outputs), ctx.num):
                own = enumerate(grad_outputs[start : start + ctx.num])
                _add(sums, {i: gradient for i, gradient in own if gradient is not None}, ctx.root, ready)
        return None, None, None, *map(sums.get, range(ctx.num)), *(None for _ in grad_outputs)


def _is_asked_for(node: Any) -> bool:
    """Whether the pass is one of `torch.autograd.grad`, in which nothing is added to a parameter's gradient."""
    children = [child for child, _ in node.next_functions if child is not None]
    if children[0].next_functions:
        return _is_asked_for(children[0])
    try:
        return not any(map(torch._C._will_engine_execute_node, children))  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError:  # torch refuses to tell of a leaf that is asked for
        return True


class _Arrival(torch.autograd.Function):
    """Parameters, whose gradients are summed beside their device's work: what follows waits for them.

    The engine runs it after all that the root itself computes: its place in the order of the graph is the first.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(parameter.detach() for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if given := [gradient for gradient in grad_outputs if gradient is not None]:
            finish_beside(given)
        return grad_outputs


def _add(sums: dict[int, Tensor], gradients: dict[int, Tensor], root: torch.device, ready: torch.Event | None) -> None:
    """Add the gradients of one replica to sums on the root's device, one bucket at a time."""
    away = [i for i, g in gradients.items() if g.device != root and g.layout is torch.strided]
    near = {i: gradient.to(root) for i, gradient in gradients.items() if i not in away}
    if near:
        with beside(root):
            finish_copy(list(near.values()), ready if has_streams(root) else None)
            both = [i for i in near if i in sums]
            # not in place: others may hold a gradient that was not copied here
            added = torch._foreach_add([sums[i] for i in both], [near[i] for i in both]) if both else ()
            sums.update(near | dict(zip(both, added, strict=True)))
    for bucket in buckets([gradients[i] for i in away], BUCKET_BYTES):
        numbers = [away[place] for place in bucket]
        shapes = [gradients[i].shape for i in numbers]
        if ready is not None and (stream := current_stream(gradients[numbers[0]].device)) is not None:
            stream.wait_event(ready)
        flat, arrived = start_copy([flattened([gradients[i] for i in numbers])], root)
        moved = dict(zip(numbers, unflattened(flat[0], shapes), strict=True))
        with beside(root):
            finish_copy(flat, arrived)
            both = [i for i in numbers if i in sums]
            if torch.is_grad_enabled():
                moved |= {i: sums[i] + moved[i] for i in both}
            elif both:  # in place, in what has come: the root holds one sum, however many replicas there are
                torch._foreach_add_([moved[i] for i in both], [sums[i] for i in both])
        sums.update(moved)
