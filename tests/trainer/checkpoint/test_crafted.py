"""Whatever a checkpoint says of its tensors, reading it is refused in a sentence, and the next one is taken."""

import copy
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.strategies.sharding.placed import PLACE
from evener.trainer.checkpoint.file_io import CheckpointError, is_good, link, read, write
from evener.trainer.checkpoint.find import find_newest

LIES: list[Any] = [
    None, -1, 0, 7, 2**40, 2**70, 1.5, float("nan"), True, "x", "", "..", "load", "_inductor", "complex128", "qint8",
    b"x", [], [[]], {}, [1, 2], [None] * 4, [0, "float32", [2**40], [0]], [0, "float32", [-1], [1]],
    [-8, "float32", [3], [1]], torch.ones(2), {PLACE: [0]}, "other.ckpt",
]  # fmt: skip


def spots(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places in nested containers."""
    if path:
        yield path
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield from spots(tree[key], (*path, key))


def with_lie(tree: Any, path: tuple[Any, ...], lie: Any) -> Any:
    changed = inner = copy.deepcopy(tree)
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = lie
    return changed


def without(tree: Any, path: tuple[Any, ...]) -> Any:
    changed = inner = copy.deepcopy(tree)
    for step in path[:-1]:
        inner = inner[step]
    del inner[path[-1]]
    return changed


def test_crafted_metadata_is_refused_in_a_sentence_and_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # TypeError and KeyError of one such file blocked resume=last: 53 of 114.
    monkeypatch.setattr(os, "fsync", lambda _: None)  # takes most of the time
    write({"pytorch-lightning_version": "2", "step": 1}, tmp_path / "old.ckpt")
    content = torch.arange(1000.0).numpy().tobytes()
    (tmp_path / "tensors").write_bytes(content)
    honest = {
        "pytorch-lightning_version": "2",
        "state_dict": {"wide": {PLACE: [0, "float32", [1000], [1]]}},
        "step": 2,
        "evener_tensors": "tensors",
        "evener_shards": {"entries": [[0, 1, 4000, 1]], "num_bytes": 4000, "digests": [zlib.crc32(content)]},
    }
    write(honest, path := tmp_path / "new.ckpt")
    assert find_newest(tmp_path) == path
    told = {key: honest[key] for key in honest if key.startswith("evener_")} | {"state_dict": honest["state_dict"]}
    crafted = [with_lie(honest, spot, lie) for spot in spots(told) for lie in LIES]
    crafted += [without(honest, spot) for spot in spots(told)]
    assert len(crafted) > 200
    num_refused = 0
    for checkpoint in crafted:
        write(checkpoint, path)
        if is_good(path):
            read(path)
            continue
        num_refused += 1
        with pytest.raises(CheckpointError, match=r"new\.ckpt (is|can.t be read)"):
            read(path)
    assert num_refused > len(crafted) // 2
    write(with_lie(honest, ("evener_tensors",), None), path)
    assert find_newest(tmp_path) == tmp_path / "old.ckpt"


def test_a_file_is_removed_with_a_checkpoint_only_if_it_is_one_of_shards(tmp_path: Path) -> None:
    # A checkpoint that is replaced takes the file along which it names: a crafted one could name any in its directory.
    write({"step": 1}, tmp_path / "best.ckpt")
    write({"evener_tensors": "best.ckpt", "evener_shards": {}}, tmp_path / "last.ckpt")
    link(tmp_path / "best.ckpt", tmp_path / "last.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.ckpt", "last.ckpt"]
