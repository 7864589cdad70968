"""Believe only what ranks of this run have written to their store, which anybody who reaches its port can write to.

With a secret, every value travels with a signature (HMAC-SHA256 of its place, its writer and number, and itself). The
place includes the attempt, so that what was written before a restart can't be written again, and of one writer's values
a reader believes none that is older than what it has read. A value without a signature is as good as not there. Values
are readable all the same, and can be deleted: what is exposed is said in docs/ddp.md.

A rank with another secret would wait for values that never come. So each announces, unsigned, a proof of its own, and
those that differ are refused by name before anything is read.
"""

import hashlib
import hmac
import itertools
import os
import secrets
from collections.abc import Callable, Iterable
from typing import Any, cast

from torch.distributed import Store

from ..core.errors import ConfigError

_SIGNATURE, _WRITER, _NUMBER = 32, 8, 8
"""Bytes before a value."""

SECRET = "EVENER_SECRET"
"""Environment variable with a text that only the ranks of one run know, the same on all machines."""


def signed(store: Store, scope: str, attempt: str = "") -> Store:
    """Sign what is written to a store for a part of the run and a start of its ranks, and verify what is read.

    Without a secret it is the store itself.
    """
    secret = os.environ.get(SECRET, "")
    return cast("Store", SignedStore(store, f"{attempt}\0{scope}\0{secret}".encode())) if secret else store


def announce(store: Store, rank: int) -> None:
    """Let the other ranks verify that this one has their secret, or none as they have."""
    store.set(f"secret/{rank}", _proof(rank))


def _proof(rank: int) -> str:
    secret = os.environ.get(SECRET, "")
    return hmac.new(secret.encode(), f"rank {rank}".encode(), hashlib.sha256).hexdigest() if secret else ""


def secret_check(store: Store, rank: int, others: Iterable[int]) -> Callable[[], None]:
    """Return what verifies what ranks have announced, as they come; it raises a ConfigError where secrets differ."""
    left = list(others)

    def verify() -> None:
        while left and store.check([f"secret/{left[0]}"]):
            other = left.pop(0)
            found = store.get(f"secret/{other}").decode(errors="replace")
            if hmac.compare_digest(found.encode(), _proof(other).encode()):
                continue
            has, lacks = (other, rank) if found else (rank, other)
            what = f"is set on rank {has}, and not on rank {lacks}"
            if os.environ.get(SECRET) and found:
                what = f"is another one on rank {other} than on rank {rank}"
            raise ConfigError(f"{SECRET} {what}. Set it to the same text on all machines, or on none.")

    return verify


class SignedStore:
    """The part of `torch.distributed.Store` that ranks use among themselves; each connection is a writer of its own."""

    def __init__(self, store: Any, key: bytes) -> None:
        self._store = store
        self._key = key
        self._writer, self._numbers = secrets.token_bytes(_WRITER), itertools.count()
        self._read_last: dict[tuple[str, bytes], bytes] = {}

    def _signature(self, key: str, signed: bytes) -> bytes:
        return hmac.new(self._key, key.encode() + b"\0" + signed, hashlib.sha256).digest()

    def _read(self, key: str) -> bytes | None:
        found: bytes = self._store.get(key)
        signature, signed = found[:_SIGNATURE], found[_SIGNATURE:]
        if not hmac.compare_digest(signature, self._signature(key, signed)):
            return None
        last = key, signed[:_WRITER]
        number = signed[_WRITER : _WRITER + _NUMBER]
        if number < self._read_last.get(last, number):
            return None
        self._read_last[last] = number
        return signed[_WRITER + _NUMBER :]

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        signed = self._writer + next(self._numbers).to_bytes(_NUMBER, "big") + value.encode()
        self._store.set(key, self._signature(key, signed) + signed)

    def get(self, key: str) -> bytes:
        """Read a value, waiting for it as the store does; a RuntimeError if no rank of this run has written it."""
        value = self._read(key)
        if value is None:
            raise RuntimeError(f"The store's {key} was not written with this run's {SECRET}; it is not believed.")
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read several values, as `get` does each."""
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        """Whether all keys were set, by ranks of this run."""
        return self._store.check(keys) and all(self._read(key) is not None for key in keys)

    def delete_key(self, key: str) -> bool:
        """Remove a value."""
        return self._store.delete_key(key)

    def clone(self) -> "SignedStore":
        """Open another connection."""
        return SignedStore(self._store.clone(), self._key)
