"""Choose the parts of a module whose activations are computed once more in the backward pass, instead of kept."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerFn, TrainerStatus
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import nn

from ..core.errors import ConfigError, verify_submodules
from ..core.module_checks import is_compiled
from ._recomputed_call import Learned, recomputing
from .module_parts import find_parts

RecomputeOption: TypeAlias = Literal["never", "always", "except_last"] | Sequence[str]
"""Which parts are recomputed: none, all, all but the last one, or submodules by name."""

FEWEST = 4
"""Number of layers from which an `nn.Sequential` of single layers is recomputed in segments."""


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
        self._installed: list[tuple[str, nn.Module, Any, list[Learned]]] = []

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
        for name, num_segments, num_kept in self._units(module, cut_at):
            part = module.get_submodule(name)
            learned: list[Learned] = [[] for _ in range(num_segments)]
            self._installed.append((name, part, vars(part).get("forward"), learned))
            if num_segments == 1:
                vars(part)["forward"] = partial(recomputing, part, part.forward, learned[0])
            else:
                vars(part)["forward"] = partial(in_segments, part, num_kept, learned)
        if not self._installed:
            raise ConfigError(
                f"{self._strategy}: recompute={self.option} finds nothing to recompute in {type(module).__name__}: it "
                "has no two parts of more than one layer. Name submodules (recompute=[encoder.block1]), or set "
                "recompute=never."
            )

    def remove(self) -> None:
        """Restore the parts' own forward."""
        while self._installed:
            _, part, own, _ = self._installed.pop()
            vars(part).pop("forward", None)
            if own is not None:
                vars(part)["forward"] = own

    def _warn(self) -> None:
        """Warn of parts that no training step has called as modules, so that nothing of them was recomputed."""
        unused = [name for name, _, _, learned in self._installed if not any(learned)]
        if unused:
            rank_zero_warn(
                f"{self._strategy}: recompute={self.option} had no effect on {', '.join(unused)}: the training step "
                "does not call them as modules. Name what it calls (strategy.recompute=[...])."
            )

    def _units(self, module: nn.Module, cut_at: Sequence[str]) -> Iterator[tuple[str, int, int]]:
        """Names, numbers of segments, and how many of these at the end are not recomputed."""
        if not isinstance(self.option, str):
            verify_submodules(f"{self._strategy}: recompute", self.option, module)
            for name in self.option:
                if type(module.get_submodule(name)).forward is nn.Module.forward:
                    raise ConfigError(f"{self._strategy}: {name} has no forward to recompute. Name the modules in it.")
            yield from ((name, 1, 0) for name in self.option)
            return
        found = list(units(module, cut_at))
        for i, (name, num_segments) in enumerate(found):
            num_kept = int(self.option == "except_last" and i == len(found) - 1)
            if num_kept < num_segments:
                yield name, num_segments, num_kept


def units(module: nn.Module, cut_at: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """List what is recomputed at once, in order of registration.

    These are the parts that stages are made of. A part that is a single layer of torch's saves nothing but its input;
    an `nn.Sequential` of such layers is run in as many segments as the square root of their number.

    Returns:
        Pairs of a submodule's name and the number of its segments.
    """
    seen: set[str] = set()
    for part in find_parts(module, cut_at):
        if part.loose:
            continue
        found = module.get_submodule(part.name)
        if not _is_layer(found):
            if type(found).forward is not nn.Module.forward:  # a list of modules has none
                yield part.name, 1
            continue
        parent = part.name.rpartition(".")[0]
        if parent not in seen:
            seen.add(parent)
            owner = module.get_submodule(parent)
            layers = [child for child in owner.children() if next(child.parameters(), None) is not None]
            chain = parent and type(owner).forward is nn.Sequential.forward and all(map(_is_layer, layers))
            if chain and len(layers) >= FEWEST:
                yield parent, round(math.sqrt(len(layers)))


def in_segments(part: Any, num_kept: int, learned: Sequence[Learned], value: Any) -> Any:
    """Run the layers of an `nn.Sequential` in segments that are recomputed one by one.

    Args:
        part: the `nn.Sequential`.
        num_kept: number of segments at the end that are not recomputed.
        learned: of each segment, what earlier calls have found out.
        value: the input.
    """
    layers, num = list(part), len(learned)
    ends = [round(len(layers) * (i + 1) / num) for i in range(num)]
    for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        segment = nn.Sequential(*layers[start:end])
        forward = partial(nn.Sequential.forward, segment)
        value = forward(value) if i >= num - num_kept else recomputing(segment, forward, learned[i], value)
    return value


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
