"""A run on one machine listens on the loopback only: nobody else reaches its store, or its processes."""

import sys
from pathlib import Path

import pytest
from launching import running

LISTENS = "0A"


def listening(pids: set[int]) -> set[str]:
    """Addresses, in hexadecimal as the kernel has them, on which processes listen."""
    sockets = {
        link.readlink().name[8:-1]
        for pid in pids
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if link.is_symlink() and str(link.readlink()).startswith("socket:[")
    }
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {line[1].partition(":")[0] for line in lines if line[3] == LISTENS and line[9] in sockets}


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads the sockets of processes from /proc")
def test_the_command_and_its_workers_listen_on_the_loopback_only(tmp_path: Path) -> None:
    with running(tmp_path, "++module.pause_s=0.05") as run:
        run.wait_for_step(2)
        found = listening({run.process.pid, run.pid_of(0), run.pid_of(1)})
    assert found
    assert found <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}, found
