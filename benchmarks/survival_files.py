"""Damage checkpoint files at random, and see what is believed of them."""

import logging
import os
import pickle
import random
import signal
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytorch_lightning as pl
import torch

from evener.trainer.checkpoint.file_io import CheckpointError, find_newest, read, write

TIMEOUT_S = 20
"""Seconds after which a search counts as hung."""
SAME = "files read as they were"
ACCEPTED = ("files found though damaged", "files read though damaged", "files that crashed", "files that ran code")


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


class Damage:
    """Damages of a file.

    Args:
        path: of the damaged file.
        original: content of the good one.
        ran: the file that a bomb makes.
        dice: where damages come from.
    """

    def __init__(self, path: Path, original: bytes, ran: Path, dice: random.Random) -> None:
        self.path, self.original, self.ran, self.dice = path, original, ran, dice

    def flip(self) -> None:
        data = bytearray(self.original)
        for _ in range(self.dice.choice([1, 1, 2, 8, 100])):
            data[self.dice.randrange(len(data))] ^= 1 << self.dice.randrange(8)
        self.path.write_bytes(data)

    def flip_end(self) -> None:
        data = bytearray(self.original)
        data[-self.dice.randint(1, 98)] ^= 1 << self.dice.randrange(8)
        self.path.write_bytes(data)

    def cut(self) -> None:
        length = len(self.original)
        self.path.write_bytes(self.original[: self.dice.choice([self.dice.randrange(length), length - 1])])

    def append(self) -> None:
        self.path.write_bytes(self.original + self.dice.randbytes(self.dice.randint(1, 100)))

    def blank(self) -> None:
        first, length = self.dice.randrange(len(self.original)), self.dice.randint(1, 4096)
        data = self.original[:first] + bytes(length) + self.original[first + length :]
        self.path.write_bytes(data[: len(self.original)])

    def garbage(self) -> None:
        heads = [b"", b"PK\x03\x04", b"\x80\x02", b"\x80\x05", self.original[: self.dice.randrange(200)]]
        self.path.write_bytes(self.dice.choice(heads) + self.dice.randbytes(self.dice.randint(0, 3000)))

    def archive(self) -> None:
        with zipfile.ZipFile(self.path, "w") as archive:
            name = self.dice.choice(["archive/data.pkl", "x/data.pkl", "a"])
            archive.writestr(name, self.dice.randbytes(self.dice.randint(0, 500)))

    def bomb(self) -> None:
        content = {"state_dict": {}, "global_step": 9, "pytorch-lightning_version": "2.6.4", "x": Bomb(self.ran)}
        if self.dice.random() < 0.5:
            self.path.write_bytes(pickle.dumps(content))
        else:
            torch.save(content, self.path)

    def foreign(self) -> None:
        """Loadable, but no trainer's checkpoint."""
        torch.save(
            self.dice.choice([{"a": 1}, {"state_dict": {}}, [1, 2], torch.zeros(3), "x", {"epoch": 9}]), self.path
        )

    def no_file(self) -> None:
        self.dice.choice([self.path.mkdir, lambda: os.mkfifo(self.path), lambda: self.path.symlink_to("nowhere")])()

    def unchanged(self) -> None:
        """A control: this one must be found."""
        self.path.write_bytes(self.original)


DAMAGES: list[Callable[[Damage], None]] = [
    *[Damage.flip] * 3, Damage.flip_end, Damage.cut, Damage.append, Damage.blank, Damage.garbage, Damage.archive,
    Damage.bomb, Damage.foreign, Damage.no_file,
]  # fmt: skip


def damage_files(folder: Path, number: int, dice: random.Random) -> dict[str, int]:
    """Put a newer damaged file beside a good one, again and again.

    Returns:
        How often the good one was found; how often the damaged one, since it reads as it was (nobody reads the gaps
        between its records); how often it was found, or could be read, as something else; how often anything but a
        CheckpointError was raised, or nothing at all in time; how often code ran.
    """
    logging.getLogger("evener").setLevel(logging.ERROR)
    signal.signal(signal.SIGALRM, _raise_timeout)
    folder.mkdir(parents=True)
    good, bad, ran = folder / "good.ckpt", folder / "bad.ckpt", folder / "ran"
    generator = torch.Generator().manual_seed(0)
    weights = {f"layer{i}.weight": torch.randn(20, 20, generator=generator) for i in range(5)}
    state = {"state_dict": weights, "global_step": 7, "epoch": 1, "pytorch-lightning_version": pl.__version__}
    write(state, good)
    os.utime(good, (1, 1))  # older than anything
    damage = Damage(bad, good.read_bytes(), ran, dice)
    counts: Counter[str] = Counter()
    damage.unchanged()
    assert find_newest(folder) == bad, "the newer file is not preferred, so nothing can be found here"
    assert read(bad)["global_step"] == 7
    while counts["files damaged"] < number:
        _remove(bad)
        kind = dice.choice(DAMAGES)
        kind(damage)
        if bad.is_file() and bad.read_bytes() == damage.original:  # zeros blanked
            continue
        counts["files damaged"] += 1
        _judge(folder, bad, kind is not Damage.foreign, state, counts)
        counts["files that ran code"] += ran.exists()
        ran.unlink(missing_ok=True)
    return {name: counts[name] for name in ("files damaged", "files passed over", SAME, *ACCEPTED)}


def _judge(folder: Path, bad: Path, unreadable: bool, state: dict[str, Any], counts: Counter[str]) -> None:
    signal.alarm(TIMEOUT_S)
    try:
        same = None
        if unreadable and bad.is_file():
            with suppress(CheckpointError):
                same = _equals(read(bad), state)
        if find_newest(folder) != bad:
            counts["files passed over"] += 1
            counts["files read though damaged"] += same is False
        else:
            counts[SAME if same else "files found though damaged"] += 1
    except Exception as exc:  # noqa: BLE001  # what is counted
        counts["files that crashed"] += 1
        print(f"CRASHED {type(exc).__name__}: {exc}", flush=True)
    finally:
        signal.alarm(0)


def _equals(found: dict[str, Any], state: dict[str, Any]) -> bool:
    tensors, expected = found.pop("state_dict", {}), state["state_dict"]
    rest = {key: value for key, value in state.items() if key != "state_dict"}
    same = tensors.keys() == expected.keys() and all(torch.equal(tensors[key], expected[key]) for key in expected)
    return same and found == rest


def _raise_timeout(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError


def _remove(path: Path) -> None:
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
