"""The state of the last steps in memory: a killed process costs no more than the steps since the last snapshot."""

import errno
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from launching import running
from seen import Failing
from tiny import quiet
from torch.utils.data import DataLoader, TensorDataset

from evener.strategies import ConfigError
from evener.strategies.core.files import temporary_for
from evener.trainer.checkpoint import Checkpoint, checkpoint_io
from evener.trainer.checkpoint.checkpoint_io import directory_in_memory, discard, move_to_disk, saved_in_memory
from evener.trainer.checkpoint.file_io import find_newest, read

pytestmark = pytest.mark.skipif(not checkpoint_io.MEMORY.is_dir(), reason="this system has no /dev/shm")


@pytest.fixture(autouse=True)
def memory_is_given_back(tmp_path: Path) -> Iterator[None]:
    """Leave nothing behind for other tests, whether a test passes or fails."""
    yield
    for directory in (tmp_path, tmp_path / "parts"):
        discard(directory)


def fit(folder: Path, at: int | None = None, checkpoint: Path | None = None, every: int | None = None) -> Failing:
    """Train 20 steps, or fail at one."""
    pl.seed_everything(3, verbose=False)
    module = Failing(at)
    trainer = quiet(max_epochs=2, callbacks=[Checkpoint(folder, every_n_epochs=1, snapshot_every_n_steps=every)])
    data = TensorDataset(torch.arange(10.0)[:, None] / 20)
    trainer.fit(module, DataLoader(data, 1, shuffle=True), ckpt_path=checkpoint)
    return module


def fail(folder: Path, at: int, every: int, checkpoint: Path | None = None) -> Path:
    """Train up to a step; return the snapshot that the run has left."""
    with pytest.raises(KeyError):
        fit(folder, at, checkpoint, every)
    memory = saved_in_memory(folder)
    assert memory is not None
    return memory


def test_a_run_goes_on_from_the_snapshot_where_that_is_newer(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole")
    memory = fail(parts := tmp_path / "parts", 17, 3)
    assert memory == directory_in_memory(parts) / "snapshot.ckpt" == find_newest(parts, memory)
    assert memory.parent.stat().st_mode & 0o777 == 0o700
    last = parts / "last.ckpt"
    assert read(last)["global_step"] == 10
    resumed = fit(parts, None, memory, every=3)
    assert resumed.begun == [15, 16, 17, 18, 19]
    assert torch.equal(resumed.layer.weight, whole.layer.weight)
    assert saved_in_memory(parts) is None, "the memory is given back at the end"
    memory = fail(parts, 9, 2)
    os.utime(last, ns=(later := memory.stat().st_mtime_ns + 1, later))
    assert find_newest(parts, memory) == last
    os.utime(memory, ns=(later + 1, later + 1))
    # of a run that failed for good it moves to the disk
    assert move_to_disk(parts) == parts / "snapshot.ckpt" == find_newest(parts)
    assert saved_in_memory(parts) is move_to_disk(parts) is None


@pytest.mark.parametrize("what", ["incomplete", "corrupted"])
def test_a_damaged_snapshot_gives_way_to_a_checkpoint_on_the_disk(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # resume=auto was blocked by it though good checkpoints lay on the disk, and went on with wrong weights.
    memory = fail(tmp_path, 17, 3)
    weight = read(memory)["state_dict"]["layer.weight"].numpy().tobytes()
    content = bytearray(memory.read_bytes())
    content[content.index(weight)] ^= 64
    memory.write_bytes(content if what == "corrupted" else content[:-100])
    assert find_newest(tmp_path, memory) == tmp_path / "last.ckpt"
    assert f"{memory} is {what}" in caplog.text
    assert move_to_disk(tmp_path) is None


def test_the_snapshot_before_is_whole_while_the_next_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = torch.save

    def torn(checkpoint: Any, file: Any) -> None:
        own(checkpoint, file)
        if checkpoint["global_step"] in (15, 18):
            raise OSError(errno.EIO, "killed")

    monkeypatch.setattr(torch, "save", torn)
    whole = fit(tmp_path / "whole")
    memory = fail(tmp_path, 17, 3)
    assert read(memory)["global_step"] == 12
    temporary_for(memory).touch()  # as a process leaves it that is killed
    fail(tmp_path, 19, 3, memory)
    assert read(memory)["global_step"] == 12
    assert {path.name for path in memory.parent.iterdir()} == {"snapshot.ckpt"}
    resumed = fit(tmp_path, None, memory)
    assert torch.equal(resumed.layer.weight, whole.layer.weight)


def test_snapshots_without_memory_or_at_no_interval_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_io, "MEMORY", tmp_path / "none")
    with pytest.raises(ConfigError, match=r"snapshot_every_n_steps=2 needs .*, which this system does not have"):
        fit(tmp_path / "own", every=2)
    with pytest.raises(ConfigError, match=r"snapshot_every_n_steps=0 is not allowed\. Give a whole number >= 1"):
        Checkpoint(snapshot_every_n_steps=0)


@pytest.mark.parametrize("foreign", ["a link", "of another user", "open to others"])
def test_a_foreign_directory_in_memory_is_told_and_nothing_in_it_is_read_or_removed(
    foreign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A link of another user's had a run delete directories of its own user's; a directory ended finished runs.
    monkeypatch.setattr(checkpoint_io, "MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir(mode=0o700)
    if foreign == "of another user":
        monkeypatch.setattr(os, "getuid", partial(int, os.getuid() + 1))
    run, kept = tmp_path / "run", tmp_path / "victim"
    kept.mkdir()
    kept.chmod(0o777 if foreign == "open to others" else 0o700)
    (kept / "snapshot.ckpt").touch()
    own = directory_in_memory(run)
    own.symlink_to(kept) if foreign == "a link" else kept.rename(own)
    with pytest.raises(ConfigError, match=r"belongs to another user, or is open to others\. Remove it, or set"):
        fit(run, every=2)
    assert saved_in_memory(run) is move_to_disk(run) is None
    discard(run)
    assert f"{own} is passed over" in caplog.text
    assert (own / "snapshot.ckpt").exists()
    fit(run)


@pytest.mark.long
def test_a_killed_rank_costs_the_steps_since_the_last_snapshot(tmp_path: Path) -> None:
    words = ["+module.fault=kill", f"+module.once={tmp_path}/once", "checkpoint=last", "launcher.max_restarts=1"]
    with running(tmp_path, *words, "checkpoint.snapshot_every_n_steps=1", "trainer.max_epochs=1") as run:
        assert run.wait(300) == 0, run.output.read_text()
        steps = [step for rank, _, step in run.lines() if rank == 0]
    assert steps[:4] == [0, 1, 2, 3]
    # the third snapshot may not have been whole; nothing was saved on the disk before the end of the epoch
    assert steps[4:] in (list(range(2, 64)), list(range(3, 64)))
    (checkpoints,) = tmp_path.rglob("checkpoints")
    assert not directory_in_memory(checkpoints).exists()
