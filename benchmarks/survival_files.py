"""Damage checkpoint files at random, and see what is believed of them."""

import logging
import pickle
import random
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from evener.trainer.checkpoint.file_io import CheckpointError, read, write
from evener.trainer.checkpoint.find import find_newest


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def damage_files(folder: Path, number: int, dice: random.Random) -> dict[str, int]:
    """Put a damaged file beside an older good one, again and again.

    Returns:
        How often the good one was found, an altered one was believed, the search crashed, and code was run.
    """
    logging.getLogger("evener").setLevel(logging.ERROR)
    folder.mkdir(parents=True)
    good, bad, ran = folder / "good.ckpt", folder / "bad.ckpt", folder / "ran"
    generator = torch.Generator().manual_seed(0)
    weights = {f"layer{i}.weight": torch.randn(20, 20, generator=generator) for i in range(5)}
    content = {"state_dict": weights, "global_step": 7, "epoch": 1, "pytorch-lightning_version": pl.__version__}
    write(content, good)
    original = good.read_bytes()
    counts: Counter[str] = Counter()
    for _ in range(number):
        kind = dice.choice(list(DAMAGES))
        DAMAGES[kind](bad, original, dice, ran)
        counts["damaged"] += 1
        if bad.read_bytes() != original:
            _judge(folder, good, bad, counts)
        counts["ran code"] += ran.exists()
        ran.unlink(missing_ok=True)
        bad.unlink()
    named = {
        name: counts[name] for name in ("damaged", "passed over", "accepted altered", "crashed the search", "ran code")
    }
    return {**named, **{name: value for name, value in sorted(counts.items()) if name not in named}}


def _judge(folder: Path, good: Path, bad: Path, counts: Counter[str]) -> None:
    try:
        found = find_newest(folder)
        counts["passed over" if found == good else "accepted altered"] += 1
        try:
            read(bad)
        except CheckpointError:
            return
    except Exception as exc:  # noqa: BLE001  # what is counted
        counts["crashed the search"] += 1
        print(f"CRASHED {type(exc).__name__}: {exc}")


def _flip(bad: Path, original: bytes, dice: random.Random, ran: Path) -> None:
    data = bytearray(original)
    for _ in range(dice.choice([1, 1, 2, 8, 100])):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    bad.write_bytes(data)


def _flip_trailer(bad: Path, original: bytes, dice: random.Random, ran: Path) -> None:
    data = bytearray(original)
    data[-dice.randint(1, 48)] ^= 1 << dice.randrange(8)
    bad.write_bytes(data)


def _cut(bad: Path, original: bytes, dice: random.Random, ran: Path) -> None:
    bad.write_bytes(original[: dice.choice([dice.randrange(len(original)), len(original) - dice.randint(1, 60)])])


def _append(bad: Path, original: bytes, dice: random.Random, ran: Path) -> None:
    bad.write_bytes(original + dice.randbytes(dice.randint(1, 100)))


def _blank(bad: Path, original: bytes, dice: random.Random, ran: Path) -> None:
    first = dice.randrange(len(original))
    length = dice.randint(1, 4096)
    bad.write_bytes((original[:first] + bytes(length) + original[first + length :])[: len(original)])


def _garbage(bad: Path, original: bytes, dice: random.Random, ran: Path) -> None:
    head = dice.choice([b"", b"PK\x03\x04", b"\x80\x02", b"\x80\x05", original[: dice.randrange(200)]])
    bad.write_bytes(head + dice.randbytes(dice.randint(0, 3000)))


def _foreign(bad: Path, original: bytes, dice: random.Random, ran: Path) -> None:
    torch.save(dice.choice([{"a": 1}, {"state_dict": {}}, [1, 2], torch.zeros(3), "text", {"epoch": 9}]), bad)


def _bomb(bad: Path, original: bytes, dice: random.Random, ran: Path) -> None:
    content = {"state_dict": {}, "global_step": 9, "pytorch-lightning_version": "2.6.4", "x": Bomb(ran)}
    if dice.random() < 0.5:
        bad.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, bad)


def _zip(bad: Path, original: bytes, dice: random.Random, ran: Path) -> None:
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr(dice.choice(["archive/data.pkl", "x/data.pkl", "a"]), dice.randbytes(dice.randint(0, 500)))


DAMAGES = {
    "bits flipped": _flip, "trailer": _flip_trailer, "cut": _cut, "appended": _append, "blanked": _blank,
    "garbage": _garbage, "foreign": _foreign, "bomb": _bomb, "zip": _zip,
}  # fmt: skip
