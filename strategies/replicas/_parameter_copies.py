"""Copies of parameters in the graph of the root's: a backward pass through replicas ends at the root's parameters.

loss ┬─ the root's part ──────────────────────┬─ the root's parameters: hooks, DDP's reducer, accumulation
     └─ a replica's part ─ copies ─ one node ─┘  (it sums the gradients of all replicas, on the root's device)
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from ..core.devices import buckets, current_stream, has_streams, is_accelerator, to_device
from ..core.transfers import beside, finish_beside, finish_copy, start_copy, work_so_far

BUCKET_BYTES = 2**25
"""Bytes moved between the root and a copy in one transfer."""


class ParameterCopy(nn.Parameter):
    """A replica's copy of a parameter: no leaf of the graph, but can be frozen and unfrozen as one."""

    grad = None  # pyright: ignore[reportAssignmentType, reportIncompatibleUnannotatedOverride]
    original: Tensor

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
            _follow([self.original], [[self]])
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


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a parameter or buffer; `follow` makes the copy of a parameter one whose gradients are the parameter's."""
    values = tensor.detach().to(device, copy=True)
    if type(tensor) is not nn.Parameter:
        return nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values
    made = ParameterCopy(values, requires_grad=False)
    vars(made).update(vars(tensor))  # a tensor may keep state of its own there
    made.original = tensor
    return made


def write(sources: Sequence[Tensor], targets: Sequence[Sequence[Tensor]]) -> None:
    """Copy tensors to lists of tensors of the same shapes, each list on one device, in few transfers."""
    with torch.inference_mode(False), torch.no_grad():
        away = [target for target in targets if sources and target[0].device != sources[0].device]
        for target in targets if sources else ():
            if target[0].device == sources[0].device:
                torch._foreach_copy_(list(target), list(sources))
        for bucket in buckets(sources, BUCKET_BYTES) if away else ():
            parts = [sources[i] for i in bucket]
            flat = _flattened(parts)
            for target in away:
                moved = _unflattened(to_device(flat, target[0].device), parts)
                torch._foreach_copy_([target[i] for i in bucket], moved)


def follow(parameters: Sequence[Tensor], copies: Sequence[Sequence[Tensor]], one_by_one: bool = False) -> None:
    """Give the gradients of each replica's copies to the parameters, `one_by_one` where DDP sees which take part."""
    for copy in (copy for own in copies for copy in own):
        copy.detach_()
    trained = [i for i, parameter in enumerate(parameters) if parameter.requires_grad]
    alone = [i for i in trained if one_by_one or parameters[i]._backward_hooks]  # hooks would be called with None
    others = [i for i in trained if i not in alone]
    bundles = buckets([parameters[i] for i in others], BUCKET_BYTES)
    for numbers in (*([i] for i in alone), *([others[place] for place in bundle] for bundle in bundles)):
        _follow([parameters[i] for i in numbers], [[own[i] for i in numbers] for own in copies])


def _follow(parameters: Sequence[Tensor], copies: Sequence[Sequence[Tensor]]) -> None:
    root, given = parameters[0].device, [copy for own in copies for copy in own]
    # values stay, and graphs of this step may have saved them
    as_they_were = torch.autograd._unsafe_preserve_version_counter(tuple(given))
    with torch.inference_mode(False), torch.enable_grad(), as_they_were:
        if has_streams(root):
            parameters = _Arrival.apply(*parameters)
        made = _Copies.apply(root, len(parameters), *parameters, *given)
    for node in {copy.grad_fn for copy in made}:
        node._set_sequence_nr(2**63 - 1)  # the engine runs it as soon as it can


class _Copies(torch.autograd.Function):
    """Parameters of one dtype, and their copies, which have the same values already."""

    @staticmethod
    def forward(ctx: Any, root: torch.device, num: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        copies = tensors[num:]
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(*copies)
        ctx.root, ctx.num = root, num
        ctx.device = next((copy.device for copy in copies if is_accelerator(copy.device)), root)
        return copies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        sums: dict[int, Tensor] = {}
        # the engine has had the stream of the first accelerator among the copies' wait for all gradients
        ready = work_so_far(ctx.device)
        for start in range(0, len(grad_outputs), ctx.num):
            _add(sums, grad_outputs[start : start + ctx.num], ctx.root, ready)
        return None, None, *map(sums.get, range(ctx.num)), *(None for _ in grad_outputs)


class _Arrival(torch.autograd.Function):
    """Parameters, whose gradients are summed beside the work of their device, which computes its own first."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(parameter.detach() for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if given := [gradient for gradient in grad_outputs if gradient is not None]:
            finish_beside(given)
        return grad_outputs


def _add(
    sums: dict[int, Tensor], gradients: Sequence[Tensor | None], root: torch.device, ready: torch.Event | None
) -> None:
    """Add the gradients of one replica to sums on the root's device, in one transfer."""
    given = {i: gradient for i, gradient in enumerate(gradients) if gradient is not None}
    if not given:
        return
    parts = list(given.values())
    source, is_flat = parts[0].device, all(part.layout is torch.strided for part in parts)
    moved, arrived = parts, ready if has_streams(root) else None
    if source != root:
        if ready is not None and (stream := current_stream(source)) is not None:
            stream.wait_event(ready)
        moved, arrived = start_copy([_flattened(parts)] if is_flat else parts, root)
    with beside(root):
        finish_copy(moved, arrived)
        new = dict(zip(given, _unflattened(moved[0], parts) if is_flat and source != root else moved, strict=True))
        both = [i for i in given if i in sums]
        old, mine = [sums[i] for i in both], [new[i] for i in both]
        if both and source != root and not torch.is_grad_enabled():
            torch._foreach_add_(mine, old)  # in what has come: the root holds one sum, however many replicas there are
        elif both:  # others may hold a gradient that was not copied here
            new |= zip(both, torch._foreach_add(old, mine), strict=True)
    sums.update(new)


def _flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Put tensors of one dtype one after the other into a new tensor of one dimension."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unflattened(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The views of a flat tensor that have the shapes of others."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
