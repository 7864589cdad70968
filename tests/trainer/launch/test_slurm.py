"""A sweep submitted to SLURM by Hydra's submitit launcher: each task is a rank, each job is one run."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from surroundings import install_slurm

from evener.trainer import Result

pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="the extra `slurm` is not installed")

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_on_slurm_is_one_run_per_job_and_one_rank_per_task(tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    install_slurm(commands)
    words = [
        "-m", "hydra/launcher=submitit_slurm", "hydra.launcher.nodes=1", "hydra.launcher.tasks_per_node=2",
        "strategy=ddp", "devices=2", "accelerator=cpu", "module.lr=0.1,0.01", "trainer.max_epochs=1",
        "trainer.limit_train_batches=2",
    ]  # fmt: skip
    sweep = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *words],
        env={**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"},
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        assert sweep.wait(200) == 0, [path.read_text() for path in tmp_path.rglob("*_log.out")]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(sweep.pid, signal.SIGKILL)  # the jobs that it submitted are of its group
    results = [Result.read(path.parent) for path in sorted(tmp_path.rglob("result.json"))]
    assert [(result.num_processes, result.global_batch) for result in results] == [(2, 128), (2, 128)]
    rates = [
        torch.load(result.best_checkpoint or "", weights_only=True)["hyper_parameters"]["lr"] for result in results
    ]
    assert rates == [0.1, 0.01]
    for result in results:
        assert len(list(Path(result.run_dir).glob("events.*"))) == 1
    assert len(list(tmp_path.glob("logs/*/multirun/*/[0-9]*"))) == 2
