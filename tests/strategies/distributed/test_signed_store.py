"""Values that no rank of this run has written are as good as not there."""

import pytest
from torch.distributed import HashStore

from evener.strategies import ConfigError
from evener.strategies.distributed.signed_store import SECRET, announce, secret_check, signed


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    monkeypatch.setenv(SECRET, "of this run")
    return HashStore()


def test_ranks_read_what_ranks_have_written(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    signed(store, "run/1").set("key", "väl\n")
    other = signed(store, "run/1")
    assert other.check(["key"])
    assert other.get("key").decode() == "väl\n"
    other.delete_key("key")
    assert not other.check(["key"])
    monkeypatch.delenv(SECRET)
    assert signed(store, "run/1") is store


def test_what_others_have_written_is_not_believed(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = signed(store, "run/1")
    ours.set("true", "1")
    store.set("bare", "1")
    store.set("short", "")
    store.set("moved", store.get("true"))
    signed(store, "run/2").set("of another part", "1")
    signed(store, "run/1", "0").set("before a restart", "1")
    assert signed(store, "run/1", "0").check(["before a restart"])
    assert not signed(store, "run/1", "1").check(["before a restart"])
    monkeypatch.setenv(SECRET, "guessed")
    signed(store, "run/1").set("guessed", "1")
    for key in ("bare", "short", "moved", "of another part", "before a restart", "guessed"):
        assert not ours.check(["true", key]), key
        with pytest.raises(RuntimeError, match=f"The store's {key} was not written with this run's EVENER_SECRET"):
            ours.get(key)


def test_what_was_written_before_is_not_believed_once_a_later_value_was_read(store: HashStore) -> None:
    rank, another, reader = (signed(store, "run/1", "0") for _ in range(3))
    rank.set("beat/0", "step 1")
    before = store.get("beat/0")
    rank.set("beat/0", "step 2")
    assert reader.get("beat/0") == b"step 2"
    store.set("beat/0", before)
    assert not reader.check(["beat/0"])
    with pytest.raises(RuntimeError, match=r"The store's beat/0 was not written with this run's EVENER_SECRET"):
        reader.get("beat/0")
    another.set("beat/0", "of another writer, whose first value it is")
    assert reader.check(["beat/0"])


@pytest.mark.parametrize(
    ("own", "other", "named"),
    [
        ("a", "b", "is another one on rank 0 than on rank 3"),
        ("a", "", "is set on rank 3, and not on rank 0"),
        ("", "b", "is set on rank 0, and not on rank 3"),
    ],
)
def test_a_rank_with_another_secret_is_named(own: str, other: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setenv(SECRET, other)
    announce(store, 0)
    monkeypatch.setenv(SECRET, own)
    announce(store, 1)
    secret_check(store, 3, [1, 2, 0])()  # rank 2 has not come yet
    with pytest.raises(ConfigError, match=f"EVENER_SECRET {named}. Set it to the same text on all machines"):
        secret_check(store, 3, [1, 0])()
