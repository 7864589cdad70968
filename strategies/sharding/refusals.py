"""Refuse what can't be trained exactly where each rank has a shard of each parameter."""

from collections.abc import Iterable, Sequence
from typing import Any

from pytorch_lightning.callbacks import ModelPruning
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import LBFGS, Adafactor, Optimizer

from ..core.errors import ConfigError

OUTSIDE = (
    "fsdp: a step uses a parameter of a part outside of the part's forward, where only this rank's shard of it is "
    "there. Leave the part out of strategy.shard, so that it is gathered for the whole step, or set "
    "strategy.shard=[] to gather all."
)

DIFFERENTIATED = (
    "fsdp: torch.autograd.grad was given a parameter that the loss was not computed from. If it is in a part that is "
    "gathered for its own forward only, set strategy.shard=[], which gathers all for the step."
)

NUMPY = (
    "fsdp: a step made a numpy array of a gathered parameter, whose memory can't be released while the array may use "
    "it. Call parameter.detach().clone().numpy() instead."
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


def refuse_assigned(module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """Refuse `load_state_dict(assign=True)`, a hook of the modules that are cut."""
    if metadata.get("assign_to_params_buffers"):
        raise ConfigError(
            "fsdp: load_state_dict(assign=True) would replace parameters that are cut over the ranks. Leave out "
            "assign=True, so that the values are copied into the shards."
        )


def verify_run(callbacks: Iterable[Any], optimizers: Iterable[Optimizer]) -> None:
    """Refuse what replaces parameters in the midst of training, or computes with more of one than its elements."""
    if any(isinstance(callback, ModelPruning) for callback in callbacks):
        raise ConfigError(
            "fsdp: ModelPruning puts other parameters in the place of those that are cut over the ranks. Leave it out, "
            "or use strategy=ddp."
        )
    for optimizer in optimizers:
        if isinstance(optimizer, (LBFGS, Adafactor)):
            raise ConfigError(
                f"fsdp: {type(optimizer).__name__} computes with whole parameters, but each rank has a shard of each. "
                "Choose an optimizer that updates each element by itself, such as AdamW, or strategy=ddp."
            )


def verify_dtypes(module: nn.Module, names: Sequence[str]) -> None:
    """Refuse parameters of several dtypes that would be reduced together; `names` are gathered one by one."""
    taken: set[int] = set()
    for name in (*names, ""):
        part = module.get_submodule(name)
        trained = [(key, p) for key, p in part.named_parameters() if p.requires_grad and id(p) not in taken]
        taken |= {id(p) for p in part.parameters()}
        dtypes = {p.dtype: key for key, p in trained}
        if len(dtypes) > 1:
            shown = ", ".join(f"{key} is {dtype}" for dtype, key in dtypes.items())
            raise ConfigError(
                f"fsdp: the parameters of {name or type(module).__name__} have several dtypes ({shown}), but those "
                "that are gathered together must have one. Name the modules of one dtype in strategy.shard, or choose "
                "strategy=ddp."
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


def without_values(name: str) -> str:
    """Say that a tensor of the module has no values."""
    return (
        f"fsdp: {name} is on the meta device, so that it has no values. Build the layers in configure_model, "
        "without torch.device('meta'): they take no memory there before they are cut."
    )


def refuse_copy(module: nn.Module, memo: Any) -> None:
    """Refuse `copy.deepcopy` of a module that is cut: its `__deepcopy__`."""
    raise ConfigError(
        f"fsdp: {type(module).__name__.removeprefix('FSDP')} is cut over the ranks, so that it can't be copied "
        "(copy.deepcopy), as a callback or a hook tries to. Copy it in __init__; for a second run with a callback that "
        "copies it, make the module anew."
    )
