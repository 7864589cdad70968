"""However a run ends, the command says why in a sentence, with the right status, in `train.log` and `result.json`."""

from pathlib import Path

import pytest
import torch
from launching import Run, running

from evener.trainer import Result


def run(folder: Path, *words: str, **environment: str) -> tuple[Run, str]:
    """Run the command on one device to its end; the run, and what it has said."""
    odd = ("module._target_=launched.Odd", "trainer.max_epochs=1", "trainer.limit_train_batches=4", "checkpoint=last")
    with running(folder, "strategy=single_device", "devices=1", *odd, *words, env=environment) as done:
        done.wait(300)
    return done, done.output.read_text()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("GeneratorExit", 1, "GeneratorExit: enough"),
        ("exit 3", 3, "SystemExit: 3"),
        ("exit 0", 1, "SystemExit: 0"),
        ("exit text", 1, "SystemExit: seen enough"),
        ("StopIteration", 1, "RuntimeError: training_step raised StopIteration, which would end the epoch without a "
         "word. Give next() a default, or begin the iterator again."),
    ],
)  # fmt: skip
def test_what_ends_a_step_is_told_with_the_users_frames(
    fault: str, status: int, reason: str, ranks: int, tmp_path: Path
) -> None:
    done, told = run(tmp_path, f"++module.fault={fault}", *(["strategy=ddp", "devices=2"] if ranks > 1 else []))
    assert done.process.poll() == status, told
    assert "in misbehave" in told
    assert "frames of libraries are left out" in told
    assert "site-packages" not in told
    assert "During handling" not in told
    (log,) = tmp_path.rglob("train.log")
    frames, _, rest = log.read_text().partition("rank 0 failed: ")[2].partition(reason)
    assert 'launched.py", line' in frames
    assert "site-packages" not in frames
    assert "site-packages" in rest, "all frames follow"
    result = Result.read(log.parent)
    assert (result.status, result.reason, result.failed_rank) == ("failed", reason, 0)
    assert result.environment["versions"]["torch"] == torch.__version__
    assert f"[{str(result.failed_at)[:-3]}" in log.read_text()  # to the minute


def test_a_ctrl_c_while_python_itself_ends_leaves_no_traceback(tmp_path: Path) -> None:
    _, told = run(tmp_path, "++module.fault=Ctrl-C")
    assert "run directory" in told
    assert "Traceback" not in told


def test_a_damaged_configuration_of_an_earlier_run_is_named(tmp_path: Path) -> None:
    for folder in ("checkpoints", ".hydra"):
        (tmp_path / "run" / folder).mkdir(parents=True)
    (checkpoint := tmp_path / "run" / "checkpoints" / "last.ckpt").touch()
    (tmp_path / "run" / ".hydra" / "config.yaml").write_bytes(b"\xff\xfe")
    done, told = run(tmp_path, "config=run", f"resume={checkpoint}")
    assert done.process.poll() == 1
    assert told.startswith("Error: config=run: ")
    assert ".hydra/config.yaml" in told
    assert "Traceback" not in told


def test_all_frames_are_shown_on_request(tmp_path: Path) -> None:
    _, told = run(tmp_path, "++module.fault=exit 3", HYDRA_FULL_ERROR="1")
    assert "in misbehave" in told
    assert "site-packages" in told
