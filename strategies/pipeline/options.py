"""Define and validate the options of model parallelism."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from typing_extensions import override

from ..core.errors import ConfigError
from ..core.options import Advice, Count, NotNegative, Options, Positive

ScheduleName: TypeAlias = Literal["1f1b", "gpipe"]
"""Order of the work on each stage; see `stage_order`."""


@dataclass(frozen=True)
class StageOptions(Options):
    """How a module is cut into stages, and a batch into micro-batches.

    Args:
        partition: `auto` balances memory over contiguous stages; a list names the first module of each stage after
            stage 0.
        num_microbatches: number of micro-batches per training batch, which run on different stages at the same time.
        schedule: order of the micro-batches on each stage. `1f1b` keeps the activations of at most as many of them as
            there are stages; `gpipe` keeps those of all.
        output_device: device of the batch, the module's outputs and the loss: `last` is the device of the module's last
            part (logits stay where they are computed), `first` the root device.
        optimizer_copies: tensors of a parameter's size that the optimizer keeps per trainable parameter: Adam 2, SGD
            with momentum 1, plain SGD 0. Used by `auto`.
        balance: what `auto` balances: `memory`, or `time`: parts are timed in the first steps, and the cut moves once.
        device_weights: relative capacities of unequal devices, one per stage, in what is balanced: memory or speed.
            None takes them for equal.
        deterministic: whether every run must be the same, so that no cut is measured (`balance=time`). None follows
            `torch.use_deterministic_algorithms` (`Trainer(deterministic=True)`).

    Raises:
        ConfigError: an option has an invalid value.
    """

    partition: Annotated[
        Literal["auto"] | Sequence[str], Advice("A list names the first module of each stage after stage 0.")
    ] = "auto"
    num_microbatches: Count = 1
    schedule: ScheduleName = "1f1b"
    output_device: Literal["last", "first"] = "last"
    optimizer_copies: NotNegative = 2
    balance: Literal["memory", "time"] = "memory"
    device_weights: Sequence[Positive] | None = None
    deterministic: bool | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
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

    def most_in_flight(self, num_microbatches: int, num_stages: int) -> list[int]:
        """The largest number of micro-batches between forward and backward, by stage."""
        ahead = [num_stages - stage for stage in range(num_stages)]
        return [num_microbatches if self.schedule == "gpipe" else min(num_microbatches, num) for num in ahead]
