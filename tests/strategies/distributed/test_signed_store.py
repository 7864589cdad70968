"""Values that no rank of this run has written are as good as not there."""

import pytest
from torch.distributed import HashStore

from evener.strategies.distributed._stop import REQUEST, StopAgreement
from evener.strategies.distributed.signed_store import SECRET, signed


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    monkeypatch.setenv(SECRET, "of this run")
    return HashStore()


def test_ranks_read_what_ranks_have_written(store: HashStore) -> None:
    signed(store, "run/1").set("key", "väl\n")
    other = signed(store, "run/1")
    assert other.check(["key"])
    assert other.get("key").decode() == "väl\n"
    other.delete_key("key")
    assert not other.check(["key"])


def test_what_others_have_written_is_not_believed(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = signed(store, "run/1")
    ours.set("true", "1")
    store.set("bare", "1")
    store.set("short", "")
    store.set("moved", store.get("true"))
    signed(store, "run/2").set("of another part", "1")
    monkeypatch.setenv(SECRET, "guessed")
    signed(store, "run/1").set("guessed", "1")
    for key in ("bare", "short", "moved", "of another part", "guessed"):
        assert not ours.check(["true", key]), key
        with pytest.raises(RuntimeError, match=f"The store's {key} was not written with this run's EVENER_SECRET"):
            ours.get(key)


def test_a_request_to_stop_that_is_not_signed_stops_nobody(store: HashStore) -> None:
    ours = signed(store, "run/1")
    store.set(REQUEST, "15")
    agreement = StopAgreement(0, 2, ours)
    agreement.listen(ours)
    assert not agreement.armed
    store.delete_key(REQUEST)
    StopAgreement(1, 2, ours).request(15)
    asking = StopAgreement(1, 2, ours)
    asking.request(15)
    asking.listen(ours)
    agreement.listen(ours)
    assert agreement.armed


def test_without_a_secret_the_store_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    store = HashStore()
    assert signed(store, "run/1") is store
