"""What surrounds a run, in a test: a pseudo-terminal, and SLURM's commands on one machine.

`sbatch` runs a script at once, `srun` starts its tasks by rank: the file itself is each of the commands.
"""

import os
import re
import select
import socket
import subprocess
import sys
import threading
from contextlib import AbstractContextManager, suppress
from itertools import pairwise
from pathlib import Path

CTRL_C = b"\x03"


class Terminal(AbstractContextManager["Terminal"]):
    """A terminal: a process that opens its `path` as the leader of a session is controlled by it.

    Attributes:
        path: the device.
        output: the file that gets what is written to it.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self._master, self._slave = os.openpty()
        self.path = Path(os.ttyname(self._slave))
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def press(self, key: bytes) -> None:
        """Press a key."""
        os.write(self._master, key)

    def close(self) -> None:
        """Close the window: the processes that the terminal controls get SIGHUP, and can't write to it any more."""
        if self._thread.is_alive():
            os.write(self._woken, b".")
            self._thread.join()

    def _read(self) -> None:
        with self.output.open("ab", buffering=0) as file:
            while True:
                ready, _, _ = select.select([self._master, self._wake], [], [])
                if self._wake in ready:
                    break
                with suppress(OSError):  # nobody has it open
                    file.write(os.read(self._master, 65536))
        for descriptor in (self._master, self._slave, self._wake, self._woken):
            os.close(descriptor)

    def __exit__(self, *_: object) -> None:
        self.close()


JOB_ID = 4242
SLURM_JOB = {
    "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_JOB_ID": "1234",
    "SLURM_NODEID": "0", "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "0",
}  # fmt: skip
"""What the two tasks of a job find, beside their rank."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def install_slurm(folder: Path) -> None:
    """Write the commands into a folder, for PATH."""
    for name in ("sbatch", "srun", "sacct"):
        command = folder / name
        command.write_text(f"#!{sys.executable}\n{Path(__file__).read_text()}")
        command.chmod(0o755)


def sbatch(script: str) -> None:
    """Run a script in the background, once per job of its array."""
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", Path(script).read_text(), re.MULTILINE))
    last = int(options["array"].partition("%")[0].partition("-")[2])
    for job in range(last + 1):
        own = {
            "SLURM_JOB_ID": JOB_ID + job, "SLURM_ARRAY_JOB_ID": JOB_ID, "SLURM_ARRAY_TASK_ID": job, "SLURM_NNODES": 1,
            "SLURM_NTASKS": options["ntasks-per-node"], "SLURM_NTASKS_PER_NODE": options["ntasks-per-node"],
        }  # fmt: skip
        subprocess.Popen(["bash", script], env=environment(own), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    sys.stdout.write(f"Submitted batch job {JOB_ID}\n")


def srun(*words: str) -> None:
    """Start the tasks of a job, and wait for them."""
    options = dict(pairwise(words))
    command = words[words.index("--error") + 2 :]
    tasks = []
    for rank in range(int(os.environ["SLURM_NTASKS"])):
        own = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": 0, "SLURM_STEP_ID": 0}
        path = options["--output"].replace("%t", str(rank))
        for letter, name in (("%A", "SLURM_ARRAY_JOB_ID"), ("%a", "SLURM_ARRAY_TASK_ID")):
            path = path.replace(letter, os.environ[name])
        with open(path, "w") as output:
            tasks.append(subprocess.Popen(command, env=environment(own), stdout=output, stderr=subprocess.STDOUT))
    for task in tasks:
        task.wait()


def environment(own: dict[str, object]) -> dict[str, str]:
    """The environment of a process, with some variables of its own."""
    return {**os.environ, **{name: str(value) for name, value in own.items()}}


def sacct(*_: str) -> None:
    """Know nothing: a job's results are found by their files."""


if __name__ == "__main__":
    {"sbatch": sbatch, "srun": srun, "sacct": sacct}[Path(sys.argv[0]).name](*sys.argv[1:])
