"""The meeting place of one machine's workers: a store on the loopback, a new one for every attempt.

torch's own (`c10d`) listens on all interfaces, and after a restart workers read stale addresses from it (torch 2.13).
"""

import uuid
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from typing_extensions import override

from ...strategies.distributed.store import LOOPBACK, host_store
from ..job.signals import Interrupted

BACKEND = "evener"


class OneMachine(RendezvousHandler):
    """The rendezvous of an agent that has no others to meet.

    Args:
        stopped: a file that is there once a signal has stopped the workers, which are not restarted then.
    """

    def __init__(self, run_id: str, stopped: Path) -> None:
        self._run_id = run_id
        self._stopped = stopped
        self._store: TCPStore | None = None
        self._is_closed = False

    @override
    def get_backend(self) -> str:
        return BACKEND

    @property
    @override
    def use_agent_store(self) -> bool:
        return True

    @override
    def next_rendezvous(self) -> RendezvousInfo:
        if self._stopped.exists():
            raise Interrupted(int(self._stopped.read_text()))
        self._store = host_store()
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))

    @override
    def is_closed(self) -> bool:
        return self._is_closed

    @override
    def set_closed(self) -> None:
        self._is_closed = True

    @override
    def num_nodes_waiting(self) -> int:
        return 0

    @override
    def get_run_id(self) -> str:
        return self._run_id

    @override
    def shutdown(self) -> bool:
        self._store = None
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return OneMachine(parameters.run_id, Path(parameters.get("stopped")))


def options(stopped: Path) -> dict[str, Any]:
    """What `LaunchConfig` is told of the rendezvous; `stopped` is `OneMachine`'s."""
    if BACKEND not in rendezvous_handler_registry._registry:
        rendezvous_handler_registry.register(BACKEND, _create)
    return {
        "rdzv_backend": BACKEND, "rdzv_configs": {"stopped": str(stopped)}, "run_id": uuid.uuid4().hex,
        "local_addr": LOOPBACK,
    }  # fmt: skip
