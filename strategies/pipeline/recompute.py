"""Compute the activations of parts of a module once more in the backward pass, instead of keeping them."""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerFn, TrainerStatus
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ..core.errors import ConfigError, verify_submodules
from ..core.module_checks import is_compiled
from ..core.patching import refill
from ..core.rng import isolated, random_state
from .plan import find_parts

RecomputeOption: TypeAlias = Literal["never", "always", "except_last"] | Sequence[str]
"""Which parts are recomputed: none, all, all but the last one, or submodules by name."""


class Recompute:
    """Recomputes activations of a module while it is installed."""

    def __init__(self, option: RecomputeOption, strategy: str) -> None:
        self.option: RecomputeOption = option if isinstance(option, str) else list(option)
        self.is_on = option != "never" and bool(option)
        self._strategy = strategy
        self._trainer: pl.Trainer | None = None
        self._installed: list[tuple[str, nn.Module, Any]] = []
        self._called: set[str] = set()

    def begin(self, trainer: pl.Trainer, partition: object = "auto") -> None:
        """Have the parts of a trainer's module recomputed in training, before the module is placed; see `install`."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._trainer = trainer
            self.install(trainer.lightning_module, partition)

    def end(self) -> None:
        """Restore the module, and warn of what had no effect in a run that was not cut short."""
        trainer, self._trainer = self._trainer, None
        unused = [name for name, *_ in self._installed if name not in self._called]
        if unused and trainer is not None and trainer.global_step and trainer.state.status != TrainerStatus.INTERRUPTED:
            rank_zero_warn(
                f"{self._strategy}: recompute={self.option} had no effect on {', '.join(unused)}: the training step "
                "does not call them as modules. Name what it calls (strategy.recompute=[...])."
            )
        self.remove()

    def install(self, module: nn.Module, partition: object = "auto") -> None:
        """Have parts recomputed until `remove`, also in copies of the module, before it is placed, cut or copied."""
        self.remove()
        if not self.is_on:
            return
        if is_compiled(module):
            raise ConfigError(
                f"{self._strategy}: recompute was given for a compiled module, whose compiler decides what is "
                "recomputed (torch._functorch.config.activation_memory_budget). Set compile=false, or "
                "strategy.recompute=never."
            )
        if isinstance(self.option, str):
            cut_at = [str(name) for name in partition] if isinstance(partition, (list, tuple)) else ()
            names = [part.name for part in find_parts(module, cut_at) if not part.loose]
            names = [name for name in names if not _keeps_little(module.get_submodule(name))]
            names = names[:-1] if self.option == "except_last" else names
        else:
            names = self.option
            verify_submodules(f"{self._strategy}: recompute", names, module)
        for name in names:
            part = module.get_submodule(name)
            if type(part).forward is nn.Module.forward:
                raise ConfigError(f"{self._strategy}: {name} has no forward to recompute. Name the modules in it.")
            self._installed.append((name, part, vars(part).get("forward")))
            vars(part)["forward"] = partial(_recomputing, self._called, name, part, part.forward)
        if not self._installed:
            raise ConfigError(
                f"{self._strategy}: recompute={self.option} finds nothing to recompute in {type(module).__name__}: it "
                "has no two parts of more than one layer. Name submodules (recompute=[encoder.block1]), or set "
                "recompute=never."
            )

    def remove(self) -> None:
        """Restore the parts' own forward."""
        self._called.clear()
        while self._installed:
            _, part, own = self._installed.pop()
            vars(part).pop("forward", None)
            if own is not None:
                vars(part)["forward"] = own


def _keeps_little(part: nn.Module) -> bool:
    """Whether a part is a layer of torch's that keeps little but its input, or a list of modules without forward."""
    is_layer = type(part).__module__.startswith("torch.nn.modules") and not list(part.children())
    return type(part).forward is nn.Module.forward or (is_layer and not isinstance(part, nn.RNNBase))


def verify_threads(devices: Sequence[torch.device], threads: bool | None, strategy: str) -> None:
    """Refuse replicas in threads of which some are on the CPU, where all draw from one random stream."""
    on_cpu = [device.type == "cpu" for device in devices]
    if (not all(on_cpu) if threads is None else threads) and any(on_cpu) and len(devices) > 1:
        raise ConfigError(
            f"{strategy}: recompute draws a part's random numbers again, but replicas in threads share the CPU's "
            f"stream ({', '.join(map(str, devices))}). Set strategy.threads=false, or give accelerators alone."
        )


_RANDOM = threading.RLock()
"""Held while the process's random streams are set back."""

_STRUCTURE = {key for key, value in nn.Module().__dict__.items() if isinstance(value, dict)}
"""Attributes of every module that a forward pass does not write: parameters, buffers, children, hooks."""

_SMALL = 2**16
"""Elements up to which a forward pass may write to a tensor that it keeps, such as the statistics of BatchNorm."""


def _recomputing(
    called: set[str], name: str, part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a part's forward, keeping its inputs only."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    called.add(name)
    leaves, spec = tree_flatten((args, kwargs))
    call, num_runs = _Call(part, [leaf for leaf in leaves if isinstance(leaf, Tensor)]), 0

    def run() -> Any:
        nonlocal num_runs
        num_runs += 1
        if num_runs == 1:
            return forward(*args, **kwargs)
        again_args, again_kwargs = tree_unflatten(leaves, spec)  # containers as they were given
        with call.again():
            return forward(*again_args, **again_kwargs)

    return checkpoint(run, use_reentrant=False, preserve_rng_state=False)


class _Call:
    """What one call of a part has read, so that another one repeats it, and leaves no trace."""

    def __init__(self, part: nn.Module, inputs: Sequence[Tensor]) -> None:
        self._part = part
        # what forward may write to: attributes, such as the states of metrics, and buffers
        owners = [owner for module in part.modules() for owner in (vars(module), module._buffers)]
        self._held = [(own, {key: _copied(v) for key, v in own.items() if key not in _STRUCTURE}) for own in owners]
        kept = [("a tensor", v) for own, held in self._held for key, v in held.items() if own[key] is v]
        named = [(f"a parameter ({name})", parameter) for name, parameter in part.named_parameters()]
        tensors = [*(("an input", tensor) for tensor in inputs), *named, *kept]
        read = [(what, v) for what, v in tensors if isinstance(v, Tensor) and not v.is_inference()]
        self._read = [(what, tensor, tensor._version) for what, tensor in read]
        self._devices = [*{tensor.device for _, tensor in read if tensor.device.type != "meta"}]
        fake = any(isinstance(tensor, FakeTensor) for _, tensor in read)
        self._random = None if fake else random_state(self._devices)  # a simulated run draws nothing
        self._dtype = torch.get_default_dtype()

    @contextmanager
    def again(self) -> Generator[None]:
        """The block of a further run, one for every backward pass through the part."""
        for what, tensor, version in self._read:
            if tensor._version != version:  # it would compute another gradient
                raise ConfigError(
                    f"recompute: {type(self._part).__name__} has {what} that was written to in or after its forward "
                    "pass, so that it can't be computed once more. Set strategy.recompute=never, or name the modules "
                    "to recompute without it (strategy.recompute=[...])."
                )
        with ExitStack() as stack:
            if self._random is not None:
                stack.enter_context(_RANDOM)
                stack.enter_context(isolated(self._devices, self._random))
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            for owner, held in self._held:
                stack.callback(refill, owner, dict(owner))
                owner.update({key: _copied(value) for key, value in held.items()})
            yield


def _copied(value: Any) -> Any:
    """A copy of what a forward pass may write to: a container, a small tensor that is not trained."""
    if isinstance(value, Tensor):
        return value if value.requires_grad or value.numel() > _SMALL else value.detach().clone()
    return value.copy() if type(value) in (list, dict, set, deque, OrderedDict) else value
