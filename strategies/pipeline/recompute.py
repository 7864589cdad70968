"""Choose the parts of a module whose activations are computed once more in the backward pass, instead of kept."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerFn, TrainerStatus
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import nn

from ..core.errors import ConfigError, verify_submodules
from ..core.module_checks import is_compiled
from ._recomputed_call import recomputing
from .module_parts import find_parts

RecomputeOption: TypeAlias = Literal["never", "always", "except_last"] | Sequence[str]
"""Which parts are recomputed: none, all, all but the last one, or submodules by name."""


class Recompute:
    """Recomputes activations of a module while it is installed.

    Args:
        option: which parts.
        strategy: name that begins messages.
    """

    def __init__(self, option: RecomputeOption, strategy: str) -> None:
        self.option: RecomputeOption = option if isinstance(option, str) else list(option)
        self._strategy = strategy
        self._trainer: pl.Trainer | None = None
        self._installed: list[tuple[str, nn.Module, Any]] = []
        self._called: set[str] = set()

    @property
    def is_on(self) -> bool:
        """Whether anything is recomputed."""
        return self.option != "never" and bool(self.option)

    def begin(self, trainer: pl.Trainer, partition: object = "auto") -> None:
        """Have the parts of a trainer's module recomputed in training, before the module is placed; see `install`."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._trainer = trainer
            self.install(trainer.lightning_module, partition)

    def end(self) -> None:
        """Restore the module, and warn of what had no effect in a run that was not cut short."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None and trainer.global_step and trainer.state.status != TrainerStatus.INTERRUPTED:
            self._warn()
        self.remove()

    def install(self, module: nn.Module, partition: object = "auto") -> None:
        """Have the parts of a module recomputed, until `remove`. Copies that are made of the module do the same.

        Args:
            module: the module, before it is placed, cut or copied.
            partition: how it will be cut into stages (`StageOptions.partition`).

        Raises:
            ConfigError: the module has no such parts, or is compiled.
        """
        self.remove()
        if not self.is_on:
            return
        if is_compiled(module):
            raise ConfigError(
                f"{self._strategy}: recompute was given for a compiled module, whose compiler decides what is "
                "recomputed (torch._functorch.config.activation_memory_budget). Set compile=false, or "
                "strategy.recompute=never."
            )
        cut_at = [str(name) for name in partition] if isinstance(partition, (list, tuple)) else ()
        for name in self._chosen(module, cut_at):
            part = module.get_submodule(name)
            self._installed.append((name, part, vars(part).get("forward")))
            vars(part)["forward"] = partial(_noted, self._called, name, partial(recomputing, part, part.forward))
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

    def _warn(self) -> None:
        """Warn of parts that no training step has called as modules, so that nothing of them was recomputed."""
        unused = [name for name, *_ in self._installed if name not in self._called]
        if unused:
            rank_zero_warn(
                f"{self._strategy}: recompute={self.option} had no effect on {', '.join(unused)}: the training step "
                "does not call them as modules. Name what it calls (strategy.recompute=[...])."
            )

    def _chosen(self, module: nn.Module, cut_at: Sequence[str]) -> Sequence[str]:
        """Names of the parts that are recomputed."""
        if isinstance(self.option, str):
            found = list(units(module, cut_at))
            return found[:-1] if self.option == "except_last" else found
        verify_submodules(f"{self._strategy}: recompute", self.option, module)
        for name in self.option:
            if type(module.get_submodule(name)).forward is nn.Module.forward:
                raise ConfigError(f"{self._strategy}: {name} has no forward to recompute. Name the modules in it.")
        return self.option


def _noted(called: set[str], name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a part's forward, and note in training that it was called as a module."""
    if torch.is_grad_enabled():
        called.add(name)
    return forward(*args, **kwargs)


def units(module: nn.Module, cut_at: Sequence[str] = ()) -> Iterator[str]:
    """Name the parts that are recomputed one by one, in order of registration.

    These are the parts that stages are made of, but for single layers of torch's, which keep little but their input.
    """
    for part in find_parts(module, cut_at):
        if not part.loose:
            found = module.get_submodule(part.name)
            if not _is_layer(found) and type(found).forward is not nn.Module.forward:  # a list of modules has none
                yield part.name


def verify_threads(devices: Sequence[torch.device], threads: bool | None, strategy: str) -> None:
    """Refuse replicas in threads of which some are on the CPU, where all draw from one random stream."""
    on_cpu = [device.type == "cpu" for device in devices]
    in_threads = not all(on_cpu) if threads is None else threads
    if in_threads and any(on_cpu) and len(devices) > 1:
        raise ConfigError(
            f"{strategy}: recompute draws a part's random numbers again, but replicas in threads share the CPU's "
            f"stream ({', '.join(map(str, devices))}). Set strategy.threads=false, or give accelerators alone."
        )


def _is_layer(module: nn.Module) -> bool:
    """Whether a module is a single layer of torch's that keeps little but its input for the backward pass."""
    ours = type(module).__module__.startswith("torch.nn.modules")
    return ours and not any(True for _ in module.children()) and not isinstance(module, nn.RNNBase)
