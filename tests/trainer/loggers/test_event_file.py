"""A run has one event file, also if it is restarted, and if its last record was cut off."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evener.trainer.loggers import TensorBoardLogger


def log(folder: Path, values: dict[int, float]) -> None:
    logger = TensorBoardLogger(folder)
    for step, value in values.items():
        logger.log_metrics({"loss": value}, step)
    logger.close()


def logged(folder: Path) -> list[tuple[int, float]]:
    (file,) = folder.iterdir()
    events = EventAccumulator(str(file))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


@pytest.mark.parametrize("torn", [b"", b"\x30\x00", b"\x30" + 7 * b"\x00" + b"1234half of a record", 64 * b"\x00"])
def test_a_writer_continues_the_file_of_the_one_before(torn: bytes, tmp_path: Path) -> None:
    log(tmp_path, {0: 4.0, 1: 3.0})
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes() + torn)
    log(tmp_path, {2: 2.0})
    log(tmp_path, {3: 1.0})
    assert logged(tmp_path) == [(0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0)]


def test_the_last_record_is_lost_if_it_is_cut_off(tmp_path: Path) -> None:
    log(tmp_path, {0: 4.0, 1: 3.0})
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    log(tmp_path, {2: 2.0})
    assert logged(tmp_path) == [(0, 4.0), (2, 2.0)]


def test_the_newest_file_of_several_is_continued(tmp_path: Path) -> None:
    log(tmp_path, {0: 4.0})
    (first,) = tmp_path.iterdir()
    newer = first.rename(tmp_path / "events.out.tfevents.0000000002.host.1.0")
    older = tmp_path / "events.out.tfevents.0000000001.host.1.0"
    older.write_bytes(newer.read_bytes())
    size = older.stat().st_size
    log(tmp_path, {1: 3.0})
    assert older.stat().st_size == size < newer.stat().st_size
