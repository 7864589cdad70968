"""A checkpoint whose tensors are in files of memory reads as it was, also if the process was killed while it wrote."""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evener.trainer.checkpoint import _host_memory
from evener.trainer.checkpoint._tensor_files import TensorFiles
from evener.trainer.checkpoint.file_io import CheckpointError, read, write


def state(number: float) -> dict[str, Any]:
    wide = torch.arange(4096.0).reshape(64, 64) + number
    return {
        "pytorch-lightning_version": "2",
        "wide": wide,
        "again": wide,
        "columns": (wide.to(torch.bfloat16).t(), 3),
        "images": wide.reshape(4, 4, 16, 16).to(memory_format=torch.channels_last),
        "few": [torch.tensor(number), torch.zeros(0), torch.ones(3, dtype=torch.bool), wide[::3, 0][:1]],
        "part": wide[:, ::2],
        "step": int(number),
    }


def verify_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    assert found["again"] is found["wide"]
    assert found["step"] == expected["step"]
    pairs = [(found[name], expected[name]) for name in ("wide", "images", "part")] + [
        (found["columns"][0], expected["columns"][0]),
        *zip(found["few"], expected["few"], strict=True),
    ]
    for own, theirs in pairs:
        assert own.dtype == theirs.dtype
        assert own.tolist() == theirs.tolist()
    assert found["images"].stride() == expected["images"].stride()


def test_what_is_read_is_what_was_taken(tmp_path: Path) -> None:
    files = TensorFiles(tmp_path)
    for number in range(3):
        write(files.take(state(number)), path := tmp_path / "snapshot.ckpt")
        files.remove_others()
        verify_equal(read(path), state(number))
    assert len(list(tmp_path.iterdir())) == 3, "the checkpoint and two files"


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads copy, each 100 bytes at a time, which divide no tensor evenly."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(_host_memory, "_PIECE", 100)


@pytest.mark.usefixtures("four_threads")
def test_what_several_threads_copied_stays_when_training_goes_on_at_once(tmp_path: Path) -> None:
    files, on_host = TensorFiles(tmp_path), _host_memory.HostMemory()
    for number in range(20):
        own = state(number)
        write(files.take(own), path := tmp_path / "snapshot.ckpt")
        copied = on_host.take(own)
        for tensor in (own["wide"], own["columns"][0], own["images"], own["part"], *own["few"]):
            tensor.zero_()  # a step that would race with a copy that goes on
        verify_equal(read(path), state(number))
        verify_equal(copied, state(number))


@pytest.mark.usefixtures("four_threads")
def test_an_error_of_one_of_the_threads_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, others = np.copyto, threading.Event()

    def copyto(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            others.set()
            raise MemoryError("none left")
        assert others.wait(60)
        copy(*args)

    monkeypatch.setattr(np, "copyto", copyto)
    with pytest.raises(MemoryError, match="none left"):
        TensorFiles(tmp_path).take(state(1))


def test_the_checkpoint_before_is_whole_while_the_next_is_written(tmp_path: Path) -> None:
    files = TensorFiles(tmp_path)
    for number in range(3):
        write(files.take(state(number)), path := tmp_path / "snapshot.ckpt")
    found = read(path)
    files.take(state(3))  # and killed before the checkpoint is replaced
    verify_equal(read(path), state(2))
    TensorFiles(tmp_path).take(state(4))  # and again, in the next process
    verify_equal(read(path), state(2))
    verify_equal(found, state(2))


def test_a_file_that_is_gone_or_cut_is_no_checkpoint(tmp_path: Path) -> None:
    write(TensorFiles(tmp_path).take(state(1)), path := tmp_path / "snapshot.ckpt")
    (tensors,) = tmp_path.glob("tensors-*")
    tensors.write_bytes(tensors.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"is incomplete: a tensor ends beyond the file"):
        read(path)
    tensors.unlink()
    with pytest.raises(CheckpointError, match=r"is incomplete: tensors-.*, which must lie beside it, is missing"):
        read(path)
