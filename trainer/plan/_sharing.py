"""Describe the memory of a device in a simulated step, and of ranks that share parameters or optimizer states."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from ...strategies.sharding.optimizer_shards import BUCKET_BYTES, MOST_BUCKETS


@dataclass
class StageMemory:
    """Bytes on one device while a module trains, once the optimizer's state exists.

    Args:
        activations: tensors that the training step saves for its backward pass.
        forward_peak: largest number of bytes at one time during the training step, including all of the above.
        backward_peak: the same during the backward pass.
        gathered: parameters of other ranks that are gathered at one time.
        owned: bytes of the optimizer's state by the rank that keeps it, where ranks share it.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    batch: int = 0
    activations: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    update_peak: int = 0
    gathered: int = 0
    owned: tuple[int, ...] = ()

    @property
    def static(self) -> int:
        """Bytes that are there whether or not a step runs."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """Largest number of bytes at one time."""
        return max(self.forward_peak, self.backward_peak, self.update_peak)

    @property
    def update_extra(self) -> int:
        """Temporaries of the optimizer's update."""
        return max(0, self.update_peak - self.static - self.batch)


@dataclass(frozen=True)
class Shards:
    """Bytes of a module whose parameters are cut over the ranks.

    Args:
        part: bytes per rank over bytes of the whole module; parameters are cut along their first dimension, and the
            last rank's rows are padded.
        root: bytes of parameters that are gathered for the whole step.
        largest: bytes of the largest part that is gathered by itself.
        gathered: bytes that are gathered between forward and backward.
        accumulates: whether gradients of several batches are added up before they are cut.
    """

    part: float
    root: int
    largest: int
    gathered: int
    accumulates: bool = False

    @classmethod
    def of(cls, module: nn.Module, names: Sequence[str], num: int, keeps_parts: bool, accumulates: bool) -> "Shards":
        """Compute the shards of a module, of which some parts are gathered one by one, and perhaps kept."""
        sizes = {id(p): p.nbytes for p in module.parameters()}
        cut = sum(-(-len(p) // num) * p.nbytes // max(len(p), 1) if p.dim() else p.nbytes for p in module.parameters())
        taken: set[int] = set()
        parts: list[int] = []
        for name in names:
            own = {id(p) for p in module.get_submodule(name).parameters()} - taken
            taken |= own
            parts.append(sum(sizes[key] for key in own))
        whole = sum(sizes.values())
        root = whole - sum(parts)
        return cls(cut / max(whole, 1), root, max(parts, default=0), whole if keeps_parts else root, accumulates)


def sharded(memory: StageMemory, shards: Shards) -> StageMemory:
    """The memory of a rank that holds a shard of everything, of a step whose parameters and gradients were in no peak.

    A part is gathered into a buffer, and from there into its parameters, while the buffer of the one before it is still
    there; in backward the next part's buffer is there already, and two copies of the part's gradients.
    """
    parameters, gradients, optimizer = (
        round(shards.part * size) for size in (memory.parameters, memory.gradients, memory.optimizer)
    )
    static = parameters + gradients + optimizer
    other = static - memory.optimizer + shards.accumulates * memory.gradients
    return replace(
        memory,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        gathered=shards.gathered + 3 * shards.largest,
        forward_peak=memory.forward_peak + other - gradients + shards.gathered + 3 * shards.largest,
        backward_peak=memory.backward_peak + other + shards.gathered + shards.root + 4 * shards.largest,
        update_peak=round(static + memory.batch + shards.part * (memory.update_peak - memory.optimizer - memory.batch)),
    )


def with_owner(memory: StageMemory, owner: int) -> StageMemory:
    """The memory of a rank that keeps the optimizer's state of its own parameters (`shard_optimizer`)."""
    own = memory.owned[owner]
    others = memory.optimizer - own
    fraction = own / max(memory.optimizer, 1)
    extra = max(round(fraction * memory.update_extra), min(memory.parameters, MOST_BUCKETS * BUCKET_BYTES))
    return replace(
        memory,
        optimizer=own,
        forward_peak=memory.forward_peak - others,
        backward_peak=memory.backward_peak - others,
        update_peak=memory.static + memory.batch - others + extra,
    )


def in_flight(memory: Sequence[StageMemory], most: Sequence[int], num_samples: int, samples: int) -> list[StageMemory]:
    """The memory of stages that keep the activations of several micro-batches at one time.

    All but the first one find, when they go backward, the gradients that were collected so far. Where all are kept when
    the first goes backward, the activations of that one are gone by then.
    """
    num_parts = -(-num_samples // samples)
    found: list[StageMemory] = []
    for stage, number in zip(memory, most, strict=True):
        batch = round(stage.batch * num_samples / samples)
        more = (number - 1) * stage.activations + batch - stage.batch
        collected = stage.gradients if number < num_parts else max(0, stage.gradients - stage.activations)
        found.append(
            replace(
                stage,
                batch=batch,
                activations=number * stage.activations,
                forward_peak=stage.forward_peak + more,
                backward_peak=stage.backward_peak + more + collected,
                update_peak=stage.update_peak + batch - stage.batch,
            )
        )
    return found
