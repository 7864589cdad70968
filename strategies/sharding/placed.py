"""Give each sharded tensor of a checkpoint a place in one file, to which every rank writes its own rows.

Torch cuts a parameter along dimension 0, in equal chunks but for the last. So the rows of all ranks, one after the
other, are the whole tensor: whoever reads the file, on any number of ranks, finds whole tensors in it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .whole import map_tensors

PLACE = "evener_place"
"""The key of a dict that stands for a tensor: where it begins in bytes, its dtype, shape and strides."""
ALIGNMENT = 64
"""Bytes of which each tensor's beginning is a multiple."""


@dataclass(frozen=True)
class Entry:
    """A tensor in the file.

    Args:
        start: where it begins, in bytes.
        num_rows: its size along dimension 0.
        row_bytes: bytes of a row.
        num_parts: number of ranks that it is cut over; 1 if it is not cut.
    """

    start: int
    num_rows: int
    row_bytes: int
    num_parts: int

    def part(self, index: int) -> tuple[int, int]:
        """Where the rows of a rank begin, and how many bytes they are."""
        chunk = -(-self.num_rows // self.num_parts)
        first, last = (min(self.num_rows, i * chunk) for i in (index, index + 1))
        return self.start + first * self.row_bytes, (last - first) * self.row_bytes


@dataclass
class Placed:
    """A checkpoint with places instead of its sharded tensors.

    Args:
        state: the same on all ranks where it has places.
        entries: the tensors, in order.
        parts: this rank's rows of each tensor; None where another rank writes them.
        num_writers: number of ranks that write.
        writer: which of them this rank is; None if it writes nothing.
        num_bytes: of all tensors, with the gaps between them.
    """

    state: Any = None
    entries: list[Entry] = field(default_factory=list[Entry])
    parts: list[Tensor | None] = field(default_factory=list["Tensor | None"])
    num_writers: int = 1
    writer: int | None = None
    num_bytes: int = 0


def place_shards(checkpoint: Mapping[str, Any], is_first: bool) -> Placed:
    """Give each sharded tensor of a checkpoint its place; all ranks must call this with the same structure.

    Args:
        checkpoint: nested dicts, lists and tuples.
        is_first: whether this is rank 0, which writes even if nothing is sharded.
    """
    placed = Placed(writer=0 if is_first else None)

    def place(tensor: Tensor) -> Any:
        return _add(placed, cast(DTensor, tensor.detach())) if isinstance(tensor, DTensor) else tensor

    placed.state = map_tensors(checkpoint, place)
    return placed


def _add(placed: Placed, tensor: DTensor) -> dict[str, Any]:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "every rank is in the mesh"
    is_cut = isinstance(tensor.placements[-1], Shard)
    num_rows, start = (tensor.shape[0] if is_cut else 1), placed.num_bytes
    entry = Entry(start, num_rows, tensor.nbytes // max(num_rows, 1), mesh.size(mesh.ndim - 1) if is_cut else 1)
    placed.num_writers = mesh.size(mesh.ndim - 1)
    placed.writer = None if any(coordinate[:-1]) else coordinate[-1]
    writes = placed.writer is not None and (is_cut or placed.writer == 0)
    placed.entries.append(entry)
    placed.parts.append(tensor.to_local() if writes else None)
    placed.num_bytes = start + -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    stride = torch.empty(tensor.shape, device="meta").stride()
    return {PLACE: [start, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(stride)]}


@dataclass(frozen=True)
class Writers:
    """The ranks that write a checkpoint together.

    Args:
        is_first: whether this is rank 0, which writes all that is not sharded, at last.
        broadcast: gives a value of rank 0 to all.
        timeout_s: seconds that rank 0 waits for the others.
    """

    is_first: bool
    broadcast: Callable[[str], str]
    timeout_s: float


class ShardIO(ABC):
    """A checkpoint plugin that can write and read checkpoints in shards."""

    sharded = False
    """Whether it writes them in shards, where the strategy has them."""

    @abstractmethod
    def save_shards(self, placed: Placed, path: Any, writers: Writers) -> None:
        """Write a checkpoint; every rank must call it."""

    @abstractmethod
    def load_shards(self, path: Any, reader: int, num_readers: int) -> dict[str, Any]:
        """Read a checkpoint whose tensors stay in their file until they are used, where it was written in shards.

        Args:
            reader: which of several ranks this is; each verifies some of the rows.
            num_readers: number of ranks.
        """
