"""Options of model parallelism: how a module is cut into stages and a batch into micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ..batch.losses import LossReduction
from ..core.errors import ConfigError

Partition: TypeAlias = Literal["auto", "manual"] | Sequence[str]
"""How a module is cut: `auto`, `manual`, or the names of the first module of each later stage."""


@dataclass(frozen=True)
class StageOptions:
    """How a module is cut into stages, and a batch into micro-batches.

    Args:
        partition: `auto` balances memory over contiguous stages; `manual` leaves placement to the module's
            `configure_model`; a list names the first module of each stage after stage 0.
        num_microbatches: parts of a training batch that are on different stages at the same time.
        output_device: where the batch, the module's outputs and the loss meet: `last` is the device of the module's
            last part (logits stay where they arise), `first` the root device.
        optimizer_copies: tensors of a parameter's size that the optimizer keeps per trainable parameter: Adam 2, SGD
            with momentum 1, plain SGD 0. Used by `auto`.
        profile_activations: whether `auto` also counts what backward keeps, measured without computing on the
            module's `example_input_array`.
        loss_reduction: what the module's loss is: `mean` over samples (or `loss_weight`), or `sum`.
        deterministic: whether one thread runs the micro-batches in order. None follows
            `torch.use_deterministic_algorithms` (`Trainer(deterministic=True)`).

    Raises:
        ConfigError: an option has no such value.
    """

    partition: Partition = "auto"
    num_microbatches: int = 1
    output_device: Literal["last", "first"] = "last"
    optimizer_copies: float = 2
    profile_activations: bool = False
    loss_reduction: LossReduction = "mean"
    deterministic: bool | None = None

    def __post_init__(self) -> None:
        named: Any = self.partition  # from a configuration it may be anything
        if self.partition not in ("auto", "manual") and (isinstance(named, str) or not isinstance(named, Sequence)):
            raise ConfigError(
                f"partition={self.partition} is unknown. Give auto, manual, or a list with the first module of each "
                "stage after stage 0."
            )
        if type(self.num_microbatches) is not int or self.num_microbatches < 1:
            raise ConfigError(f"num_microbatches={self.num_microbatches!r} is no count. Give 1 or more.")
        if self.output_device not in ("last", "first"):
            raise ConfigError(f"output_device={self.output_device} is unknown. Give last or first.")
        if self.loss_reduction not in ("mean", "sum"):
            raise ConfigError(f"loss_reduction={self.loss_reduction} is unknown. Give mean or sum.")
        if not self.optimizer_copies >= 0:
            raise ConfigError(f"optimizer_copies={self.optimizer_copies} is negative. Give 0 or more (Adam: 2).")
