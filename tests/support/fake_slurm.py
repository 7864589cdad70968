"""What a test needs of SLURM, on one machine: `sbatch` runs a script at once, `srun` starts its tasks by rank."""

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

JOB_ID = 4242


def install(folder: Path) -> None:
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
