"""Define and validate the options of model parallelism."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

import torch
from typing_extensions import Self

from ..batch.losses import LossReduction
from ..core.errors import ConfigError, verify_choice
from ._schedule import ScheduleName

Partition: TypeAlias = Literal["auto", "manual"] | Sequence[str]
"""Cut of a module: `auto`, `manual`, or the names of the first module of each later stage."""


Overlap: TypeAlias = Literal["launch", "threads"]
"""How stages work on different micro-batches at the same time; see `_turns.py`."""


@dataclass(frozen=True)
class StageOptions:
    """How a module is cut into stages, and a batch into micro-batches.

    Args:
        partition: `auto` balances memory over contiguous stages; `manual` leaves placement to the module's
            `configure_model`; a list names the first module of each stage after stage 0.
        num_microbatches: number of micro-batches per training batch, which run on different stages at the same time.
        schedule: order of the micro-batches on each stage. `1f1b` keeps the activations of at most as many of them as
            there are stages; `gpipe` keeps those of all.
        overlap: how stages work on different micro-batches at the same time: `threads`, which CPUs need, or `launch`,
            one after the other, which is enough where work is only queued. None takes `launch` if all stages are on
            accelerators.
        output_device: device of the batch, the module's outputs and the loss: `last` is the device of the module's last
            part (logits stay where they are computed), `first` the root device.
        optimizer_copies: tensors of a parameter's size that the optimizer keeps per trainable parameter: Adam 2, SGD
            with momentum 1, plain SGD 0. Used by `auto`.
        balance: what `auto` balances: `memory`, or `time`: parts are timed in the first steps, and the cut moves once.
        device_weights: relative capacities of unequal devices, one per stage, in what is balanced: memory or speed.
            None takes them for equal.
        profile_activations: whether `auto` also counts activations saved for backward, measured without computing
            from the module's `example_input_array`.
        loss_reduction: reduction of the module's loss: `mean` over samples (or `loss_weight`), or `sum`.
        deterministic: whether micro-batches take random numbers in the same order in every run: `overlap` is `launch`.
            None follows `torch.use_deterministic_algorithms` (`Trainer(deterministic=True)`).

    Raises:
        ConfigError: an option has an invalid value.
    """

    partition: Partition = "auto"
    num_microbatches: int = 1
    schedule: ScheduleName = "1f1b"
    overlap: Overlap | None = None
    output_device: Literal["last", "first"] = "last"
    optimizer_copies: float = 2
    balance: Literal["memory", "time"] = "memory"
    device_weights: Sequence[float] | None = None
    profile_activations: bool = False
    loss_reduction: LossReduction = "mean"
    deterministic: bool | None = None

    def __post_init__(self) -> None:
        named: Any = self.partition  # a configuration may hold anything
        if self.partition not in ("auto", "manual") and (isinstance(named, str) or not isinstance(named, Sequence)):
            raise ConfigError(
                f"partition={self.partition} is unknown. Give auto, manual, or a list with the first module of each "
                "stage after stage 0."
            )
        if type(self.num_microbatches) is not int or self.num_microbatches < 1:
            raise ConfigError(f"num_microbatches must be an integer >= 1; got {self.num_microbatches!r}.")
        verify_choice("schedule", self.schedule, ScheduleName)
        if self.overlap is not None:
            verify_choice("overlap", self.overlap, Overlap)
        verify_choice("output_device", self.output_device, Literal["last", "first"])
        verify_choice("loss_reduction", self.loss_reduction, LossReduction)
        verify_choice("balance", self.balance, Literal["memory", "time"])
        self._verify_balance()
        if not self.optimizer_copies >= 0:
            raise ConfigError(f"optimizer_copies must be >= 0 (Adam: 2); got {self.optimizer_copies}.")

    def _verify_balance(self) -> None:
        if self.partition != "auto" and (self.balance != "memory" or self.device_weights is not None):
            raise ConfigError(
                f"balance={self.balance}, device_weights={self.device_weights}: partition={self.partition} says where "
                "the module is cut. Set partition=auto, or leave these out."
            )
        if self.balance == "time" and (self.num_microbatches == 1 or self.deterministic):
            raise ConfigError(
                f"balance=time with num_microbatches={self.num_microbatches}, deterministic={self.deterministic}: "
                "stages wait for each other only with micro-batches, and a measured cut is not the same in every run. "
                "Set num_microbatches=2 or more and deterministic=false, or balance=memory."
            )
        if self.device_weights is not None and not all(weight > 0 for weight in self.device_weights):
            raise ConfigError(f"device_weights must be positive; got {list(self.device_weights)}.")

    @property
    def is_deterministic(self) -> bool:
        """Whether random numbers must be taken in the same order in every run."""
        return torch.are_deterministic_algorithms_enabled() if self.deterministic is None else self.deterministic

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> Self:
        """Take these options out of a dict of several kinds of options."""
        return cls(**{field.name: options.pop(field.name) for field in fields(cls) if field.name in options})
