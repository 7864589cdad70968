"""A run directory belongs to one command at a time."""

import signal
from pathlib import Path

import pytest
from launching import running


@pytest.mark.long
def test_a_second_command_with_the_same_directory_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    # both wrote the same files; one died with a ValueError, the other ended well
    words = ("strategy=single_device", "devices=1", f"hydra.run.dir={tmp_path}/run", "trainer.max_epochs=1")
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
    with running(tmp_path / "first", *words, "++module.pause_s=600") as first:
        first.wait_for_step(0, num_ranks=1)
        with running(tmp_path / "second", *words, "seed=12") as second:
            assert second.wait(300) == 1
            told = f"run_dir={tmp_path}/run is in use by process {first.process.pid} on "
            assert told in second.output.read_text()
        first.process.send_signal(signal.SIGKILL)
        first.wait(300)
    with running(tmp_path / "third", *words) as third:
        assert third.wait(300) == 0, third.output.read_text()
    assert not (tmp_path / "run" / ".lock").exists()
