"""Refuse what can't be trained exactly where each rank has a shard of each parameter."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ..core.errors import ConfigError

OUTSIDE = (
    "fsdp: a step uses a parameter of a part outside of the part's forward, where only this rank's shard of it is "
    "there. Leave the part out of strategy.shard, so that it is gathered for the whole step, or set "
    "strategy.shard=[] to gather all."
)


def needs_whole(call: str) -> str:
    """Say that a call needs what this rank does not have."""
    return (
        f"fsdp: `{call}` is called with a parameter, gradient or optimizer state, of which this rank has only a "
        "shard. Call it with tensor.full_tensor(), on all ranks; write by tensor.copy_(values), save by "
        "trainer.save_checkpoint, or choose strategy=ddp."
    )


def verify_data(tensor: Tensor, value: Tensor) -> None:
    """Refuse values of another shape or dtype for what is cut over the ranks."""
    if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        raise ConfigError(
            f"fsdp: parameter.data has the shape {tuple(tensor.shape)} and is {tensor.dtype}, but was set to a tensor "
            f"of the shape {tuple(value.shape)}, which is {value.dtype}. A parameter that is cut over the ranks keeps "
            "both; change it in __init__ or configure_model."
        )


def refuse_unreduced(names: Sequence[str]) -> None:
    """Refuse gradients that a step has computed without having them averaged over the ranks."""
    if names:
        raise ConfigError(
            f"fsdp: training_step computed gradients of {', '.join(names[:3])} from this rank's samples alone. Compute "
            "them by self.manual_backward(loss), which averages them over the ranks; if its loss has gradients of "
            "torch.autograd.grad in it, set strategy.shard=[]. Or set strategy=single_device."
        )


def verify_plain(output: Any) -> None:
    """Refuse a loss whose gradients would not be averaged over the ranks: of shards, or from passes in a hook."""
    loss = output.get("loss") if isinstance(output, dict) else output
    if isinstance(loss, DTensor):
        raise ConfigError(OUTSIDE)
    if isinstance(loss, Tensor) and loss.is_leaf and loss.requires_grad and not isinstance(loss, nn.Parameter):
        raise ConfigError(
            "fsdp: the loss has no graph, so that hooks compute the gradients, in backward passes of their own that "
            "no rank averages. Call self.manual_backward for each of these (automatic_optimization=False), or use "
            "strategy=ddp."
        )


class LateParameters:
    """Refuses parameters that a module is given after it was cut: no rank would gather or reduce them."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._may_be_there = module, False
        self._known = set(map(id, module.parameters()))
        register = (register_module_parameter_registration_hook, register_module_module_registration_hook)
        self.handles = [one(lambda *_: setattr(self, "_may_be_there", True)) for one in register]

    def verify(self) -> None:
        """Look at the module between steps, if anything was registered in any module since the last look."""
        if self._may_be_there:
            self._may_be_there = False
            late = [name for name, p in self._module.named_parameters() if id(p) not in self._known]
            if late:
                raise ConfigError(
                    f"fsdp: {', '.join(late)} was added, or replaced by another parameter, after the module was cut "
                    "over the ranks. Do so in __init__ or configure_model, or write to it: p.data.copy_(values)."
                )


def refuse_copy(module: nn.Module, memo: Any) -> None:
    """Refuse `copy.deepcopy` of a module that is cut: its `__deepcopy__`."""
    raise ConfigError(
        f"fsdp: {type(module).__name__} is cut over the ranks, so that it can't be copied (copy.deepcopy), as a "
        "callback or a hook tries to. Copy it in __init__; for a second run with such a callback, make the module anew."
    )
