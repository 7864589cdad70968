"""How ranks end: nothing of torch's runs on while the interpreter is taken apart, and what was written is kept."""

import subprocess
import sys
from pathlib import Path

import pytest
import warm_python

SUPPORT = Path(__file__).parents[2] / "support"

ENDING = """
import atexit, os, sys, threading, time
from datetime import timedelta
from torch.distributed import TCPStore
from evener.strategies.distributed.processes import end_process

def write(name):
    open(os.path.join(sys.argv[1], name), "w").write("written")

def finish():
    time.sleep(0.3)
    write("thread")

def ask(store):
    while True:
        store.set("key", "value")

store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), multi_tenant=True)
for _ in range(4):
    threading.Thread(target=ask, args=(store.clone(),), daemon=True).start()
threading.Thread(target=finish).start()
atexit.register(write, "atexit")
sys.stdout.write("not flushed")
end_process(3)
"""


@pytest.mark.long
def test_a_process_ends_with_its_status_while_threads_are_in_native_code(tmp_path: Path) -> None:
    # with sys.exit in its place this process aborts (SIGABRT, "terminate called without an active exception")
    command = [sys.executable, "-c", ENDING, str(tmp_path)]
    done = subprocess.run(command, timeout=300, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "not flushed", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["atexit", "thread"]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads the threads of a process from /proc")
def test_the_groups_threads_end_before_the_interpreter(tmp_path: Path) -> None:
    done = warm_python.run(
        "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", SUPPORT / "plain_script.py",
        tmp_path / "log", "threads",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        names = (tmp_path / f"log.threads{rank}").read_text().split()
        assert not [name for name in names if "gloo" in name], names
