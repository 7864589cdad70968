"""Believe only what ranks of this run have written to their store, which anybody who reaches its port can write to.

With a secret, every value travels with a signature (HMAC-SHA256 of its place and itself). A value without one is as
good as not there. Values are readable all the same, and can be deleted: what is exposed is said in docs/ddp.md.
"""

import hashlib
import hmac
import os
from typing import Any, cast

from torch.distributed import Store

SECRET = "EVENER_SECRET"
"""Environment variable with a text that only the ranks of one run know, the same on all machines."""


def signed(store: Store, scope: str) -> Store:
    """Sign what is written to a store, and verify what is read, if there is a secret.

    Args:
        scope: the part of the run that it serves, so that values of another part don't count.
    """
    secret = os.environ.get(SECRET, "")
    return cast("Store", SignedStore(store, f"{scope}\0{secret}".encode())) if secret else store


class SignedStore:
    """The part of `torch.distributed.Store` that ranks use among themselves.

    Args:
        store: where values are.
    """

    def __init__(self, store: Any, key: bytes) -> None:
        self._store = store
        self._key = key

    def _signature(self, key: str, value: bytes) -> bytes:
        return hmac.new(self._key, key.encode() + b"\0" + value, hashlib.sha256).digest()

    def _read(self, key: str) -> bytes | None:
        found: bytes = self._store.get(key)
        signature, value = found[:32], found[32:]
        return value if hmac.compare_digest(signature, self._signature(key, value)) else None

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._store.set(key, self._signature(key, value.encode()) + value.encode())

    def get(self, key: str) -> bytes:
        """Read a value, waiting for it as the store does.

        Raises:
            RuntimeError: the value was not written by a rank of this run.
        """
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
