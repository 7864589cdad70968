"""Checkpoint files: whole or not at all, verified, plain data only; written in the background without losing any."""

import dataclasses
import errno
import os
import pickle
import random
import signal
import socket
import zlib
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from killing import in_child
from lightning_fabric.plugins import TorchCheckpointIO
from tiny import quiet
from torch.distributed import HashStore

from evener.strategies import ConfigError
from evener.strategies.core.files import temporary_for
from evener.strategies.distributed.store import RankError
from evener.strategies.sharding.whole import PLACE, place_shards
from evener.trainer.checkpoint import file_io
from evener.trainer.checkpoint._hparams import to_plain
from evener.trainer.checkpoint.checkpoint_io import VerifiedCheckpointIO
from evener.trainer.checkpoint.file_io import (
    CheckpointError,
    find_newest,
    link,
    read,
    read_good,
    remove_leftovers,
    write,
)

STATE = {"state_dict": {"weight": torch.arange(1000.0)}, "global_step": 7}
TRAINERS = {**STATE, "pytorch-lightning_version": "2"}
EARLIER = Path(__file__).parent / "files"
"""One file of each layout from before kinds and checksums."""


class Bomb:
    """Loading it with pickle makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("background", [False, True])
def test_a_process_killed_while_saving_leaves_only_whole_files(background: bool, tmp_path: Path) -> None:
    def save_until_killed(seed: int) -> None:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, random.Random(seed).uniform(0.02, 0.12))
        io = VerifiedCheckpointIO(background=background)
        for step in count():
            data = {"step": step, "weights": torch.full((20_000,), float(step))}
            io.save_checkpoint(data, tmp_path / f"{step % 3}.ckpt")
            io.link_checkpoint(tmp_path / f"{step % 3}.ckpt", tmp_path / "last.ckpt")

    for seed in range(12):
        assert in_child(save_until_killed, seed) == -signal.SIGKILL
        for file in tmp_path.glob("*.ckpt"):
            state = read(file)
            assert bool((state["weights"] == state["step"]).all())
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["0.ckpt", "1.ckpt", "2.ckpt", "last.ckpt"]


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("weights_only", [None, False])
def test_a_pickle_bomb_is_refused_and_leaves_no_marker(zipped: bool, weights_only: bool | None, tmp_path: Path) -> None:
    bomb = {"state_dict": {}, "callbacks": Bomb(tmp_path / "marker")}
    if zipped:
        torch.save(bomb, tmp_path / "bomb.ckpt")
    else:
        (tmp_path / "bomb.ckpt").write_bytes(pickle.dumps(bomb, protocol=2))
    with pytest.raises(CheckpointError, match=r"bomb\.ckpt is refused.* \((posix|os)\.system\)"):
        VerifiedCheckpointIO().load_checkpoint(tmp_path / "bomb.ckpt", weights_only=weights_only)
    assert not (tmp_path / "marker").exists()


def test_an_object_in_the_state_is_named_when_it_is_saved() -> None:
    with pytest.raises(ConfigError, match=r"entry callbacks\.Mine\.bomb has type test_file_io\.Bomb"):
        to_plain({"callbacks": {"Mine": {"bomb": Bomb(Path())}}})


def test_a_save_in_the_background_holds_the_state_of_its_moment(tmp_path: Path) -> None:
    io = VerifiedCheckpointIO(background=True)

    def state(number: int) -> dict[str, Any]:
        wide = torch.arange(4096.0).reshape(64, 64) + number
        images = wide.reshape(4, 4, 16, 16).to(memory_format=torch.channels_last)
        few = [torch.tensor(number), torch.zeros(0), torch.ones(3, dtype=torch.bool), wide[::3, 0][:1], wide[:, ::2]]
        more = {"first": torch.full((700,), number)} if number % 7 == 5 else {}
        return {**more, "wide": wide, "again": wide, "columns": wide.bfloat16().t(), "images": images, "few": few}

    for step in range(20):
        saved = state(step)
        io.save_checkpoint(saved, tmp_path / f"{step}.ckpt")
        for tensor in filter(torch.is_tensor, [*saved.values(), *saved["few"]]):
            tensor.zero_()  # a step that would race with a copy that goes on
    io.teardown()
    for step in range(20):
        loaded, expected = read(tmp_path / f"{step}.ckpt"), state(step)
        assert loaded["wide"].data_ptr() == loaded["again"].data_ptr()
        assert loaded["images"].stride() == expected["images"].stride()
        torch.testing.assert_close(loaded, expected, rtol=0, atol=0)
        assert (tmp_path / f"{step}.ckpt").stat().st_size < 60_000, "each tensor alone, not the memory around it"


def test_the_last_file_is_written_when_the_process_ends_at_once(tmp_path: Path) -> None:
    def work() -> None:
        io = VerifiedCheckpointIO(background=True)
        io.save_checkpoint({"weight": torch.ones(1_000_000)}, tmp_path / "a.ckpt")

    assert in_child(work) == 0
    assert read(tmp_path / "a.ckpt")["weight"].sum() == 1_000_000


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_keeps_the_old_files(background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write(STATE, old := tmp_path / "old.ckpt")
    before = old.read_bytes()
    monkeypatch.setattr(file_io.os, "fsync", no_room)
    monkeypatch.setattr(file_io.os, "link", no_room)  # a file system without hard links
    monkeypatch.setattr(file_io.shutil, "copyfile", no_room)
    io = VerifiedCheckpointIO(background)

    def replace(work: Any, *args: Any) -> None:
        work(*args)
        io.remove_checkpoint(old)  # it was to be replaced
        io.wait()

    for work, *args in (
        (io.save_checkpoint, STATE, tmp_path / "new.ckpt"), (io.save_checkpoint, STATE, old),
        (io.link_checkpoint, old, tmp_path / "last.ckpt"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=r"\.ckpt could not be written \(No space left on device\)"):
            replace(work, *args)
    assert old.read_bytes() == before
    assert os.listdir(tmp_path) == ["old.ckpt"]


def test_a_rank_that_has_not_written_its_shards_is_named(tmp_path: Path) -> None:
    one = SimpleNamespace(is_global_zero=True, broadcast=str, group=SimpleNamespace(timeout_s=0.1, _store=HashStore()))
    first = dataclasses.replace(place_shards(STATE, is_first=True), num_writers=2)
    with pytest.raises(RankError, match=r"^rank 1 has not written its shards of a checkpoint within 0\.1 s$"):
        VerifiedCheckpointIO(sharded=True).save_shards(first, tmp_path / "a.ckpt", one)


def test_a_directory_is_made_and_what_stands_in_the_place_of_a_file_or_a_directory_is_told(tmp_path: Path) -> None:
    io = VerifiedCheckpointIO()
    io.save_checkpoint(STATE, good := tmp_path / "gone" / "a.ckpt")
    assert read(good)["global_step"] == 7
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not be written"):
        io.save_checkpoint(STATE, tmp_path / "file" / "a.ckpt")
    (last := tmp_path / "last.ckpt").mkdir()
    for write_to in (partial(io.save_checkpoint, STATE), partial(VerifiedCheckpointIO().link_checkpoint, good)):
        with pytest.raises(CheckpointError, match=r"last\.ckpt could not be written \(Is a directory\)"):
            write_to(last)


def test_leftovers_of_the_living_and_of_other_programs_stay(tmp_path: Path) -> None:
    path = temporary_for(tmp_path / "a.ckpt")
    living = tmp_path / path.name.replace(f"-{os.getpid()}.", f"-{os.getppid()}.")
    foreign, other = tmp_path / ".a.ckpt.another-host-1.tmp", tmp_path / f".x.ckpt.{socket.gethostname()}-abc.tmp"
    for file in (path, living, foreign, other):
        file.touch()
    remove_leftovers(tmp_path)
    assert set(tmp_path.iterdir()) == {living, foreign, other}


@pytest.mark.parametrize("background", [False, True])
def test_an_address_is_written_read_copied_and_removed_where_it_points(
    background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where `memory:/` would appear if the address were taken for a path
    io = VerifiedCheckpointIO(background=background)
    first, second = "memory://addresses/first.ckpt", "memory://addresses/second.ckpt"
    io.save_checkpoint(STATE, first)
    io.link_checkpoint(first, second)
    io.remove_checkpoint(first)
    assert io.load_checkpoint(second)["state_dict"]["weight"].sum() == 999 * 500
    with pytest.raises(FileNotFoundError, match="first"):
        io.load_checkpoint(first)
    io.teardown()
    assert list(tmp_path.iterdir()) == []


def test_a_given_checkpoint_io_is_kept_and_lightnings_options_are_refused_as_by_its_own(tmp_path: Path) -> None:
    given = TorchCheckpointIO()
    assert quiet(plugins=[given]).strategy.checkpoint_io is given
    with pytest.raises(TypeError, match="storage_options"):
        VerifiedCheckpointIO().save_checkpoint(STATE, tmp_path / "a.ckpt", storage_options={})


@pytest.mark.parametrize("save", [write, torch.save])
def test_a_damaged_file_is_refused_or_reads_as_it_was(save: Any, tmp_path: Path) -> None:
    """Bits that nobody reads, such as the gaps between records, may change; torch notices no bit of a tensor."""
    save(STATE, path := tmp_path / "a.ckpt")
    content, dice, num_refused = path.read_bytes(), random.Random(save.__name__), 0
    for _ in range(400):
        damaged = bytearray(content)
        damaged[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        try:
            found = read(path)
        except CheckpointError:
            num_refused += 1
        else:
            assert found["global_step"] == 7
            assert found["state_dict"]["weight"].equal(torch.arange(1000.0))
    assert num_refused > 300
    for size in [0, 1, *(dice.randrange(len(content) - 48) for _ in range(200))]:
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"a\.ckpt is (incomplete|corrupted)"):
            read(path)


def test_a_record_that_is_marked_as_a_directory_is_refused(tmp_path: Path) -> None:
    # One bit of the archive's directory had torch read nothing, and leave the tensor as the memory was.
    write(STATE, path := tmp_path / "a.ckpt")
    content = bytearray(path.read_bytes())
    content[content.rindex(b"/data/0") - len("archive") - 46 + 38] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.ckpt is corrupted: .*data/0 is a directory"):
        read(path)


def test_garbage_and_foreign_files_are_never_the_newest(tmp_path: Path) -> None:
    write(TRAINERS, tmp_path / "good.ckpt")
    os.utime(tmp_path / "good.ckpt", (10, 10))
    rng = random.Random(0)
    for i in range(200):  # pickles of protocol 2 to 4, and noise, each cut and altered at random
        seed = pickle.dumps({"a": [i, "text", (1.5, None)], "b": {"c": b"bytes"}}, protocol=2 + i % 3)
        junk = bytearray(seed if i % 3 else rng.randbytes(60))
        junk[rng.randrange(len(junk))] = rng.randrange(256)
        (tmp_path / f"junk-{i}.ckpt").write_bytes(junk[: rng.randrange(len(junk) + 1)])
    torch.save({"weights": torch.ones(2)}, tmp_path / "foreign.ckpt")
    torch.save([1, 2], tmp_path / "list.ckpt")
    (tmp_path / "directory.ckpt").mkdir()
    assert find_newest(tmp_path) == tmp_path / "good.ckpt"
    with pytest.raises(CheckpointError, match=r"list\.ckpt contains a list, which is not a checkpoint"):
        read(tmp_path / "list.ckpt")
    with pytest.raises(CheckpointError, match=r"directory\.ckpt is incomplete.*directory"):
        read(tmp_path / "directory.ckpt")


TENSORS = torch.arange(1000.0).numpy().tobytes()
HONEST: dict[str, Any] = {
    "pytorch-lightning_version": "2",
    "state_dict": {"wide": {PLACE: [0, "float32", [1000], [1]]}},
    "evener_tensors": "tensors",
    "evener_shards": {"entries": [[0, 1, 4000, 1]], "num_bytes": 4000, "digests": [zlib.crc32(TENSORS)]},
}
PLACES: list[Any] = [
    None, [0], [-8, "float32", [3], [1]], [0, "float32", [-1], [1]], [0, "float32", [2**40], [0]],
    [0, "_inductor", [1000], [1]], [2, "float32", [10], [1]], [2**70, "float32", [3], [1]], [0, 7, [3], [1]],
]  # fmt: skip
LIES: list[dict[str, Any]] = [
    *({"state_dict": {"wide": {PLACE: place}}} for place in PLACES),
    {"evener_tensors": None}, {"evener_tensors": "other.ckpt"}, {"evener_tensors": [1]}, {"evener_shards": None},
    {"evener_shards": {**HONEST["evener_shards"], "entries": [[0, 1, 2**40, 1]]}},
    {"evener_shards": {**HONEST["evener_shards"], "digests": [7]}}, {"evener_shards": {"digests": [7]}},
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_crafted_metadata_is_refused_in_a_sentence_and_passed_over(lie: dict[str, Any], tmp_path: Path) -> None:
    # TypeError and KeyError of one such file blocked resume=last
    write({"pytorch-lightning_version": "2", "step": 1}, tmp_path / "old.ckpt")
    (tmp_path / "tensors").write_bytes(TENSORS)
    write(HONEST, path := tmp_path / "new.ckpt")
    assert find_newest(tmp_path) == path
    write({**HONEST, **lie}, path)
    with pytest.raises(CheckpointError, match=r"new\.ckpt is (incomplete|corrupted|refused)"):
        read(path)
    assert find_newest(tmp_path) == tmp_path / "old.ckpt"


def test_a_file_is_removed_with_a_checkpoint_only_if_it_is_one_of_shards(tmp_path: Path) -> None:
    # A checkpoint that is replaced takes the file along which it names: a crafted one could name any in its directory.
    write({"step": 1}, tmp_path / "best.ckpt")
    write({"evener_tensors": "best.ckpt", "evener_shards": {}}, tmp_path / "last.ckpt")
    link(tmp_path / "best.ckpt", tmp_path / "last.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.ckpt", "last.ckpt"]


@pytest.mark.parametrize("path", ["plain/last.ckpt", "memory/snapshot.ckpt", "shards/last.ckpt"])
def test_a_file_of_an_earlier_version_is_good_and_read(path: str) -> None:
    assert read_good(EARLIER / path)
    found = read(EARLIER / path)
    assert found["global_step"] == 7
    assert torch.equal(found["state_dict"]["wide"], torch.arange(300.0).reshape(3, 100))
    assert found["state_dict"]["few"].tolist() == [1, 1]
    assert found["hyper_parameters"] == {"cfg": {"lr": 0.1, "out": 0.1}, "where": "a/b"}
