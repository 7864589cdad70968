"""The schedules, against tables drawn by hand."""

from itertools import product

import pytest

from evener.strategies.pipeline.schedule import ScheduleName, Task, launch_order, most_in_flight, timeline

BOTH: tuple[ScheduleName, ...] = ("1f1b", "gpipe")
SIZES = list(product(range(1, 7), range(1, 5)))


def needs(task: Task, num_stages: int) -> set[Task]:
    """The tasks that must be done before a task, other than those of its own stage."""
    if task.phase == "F":
        return {task._replace(stage=task.stage - 1)} if task.stage > 0 else set()
    return {task._replace(stage=task.stage + 1)} if task.stage < num_stages - 1 else {task._replace(phase="F")}


def drawn(name: ScheduleName, num_microbatches: int, num_stages: int) -> list[str]:
    ticks = timeline(name, num_microbatches, num_stages)
    cells = [{task.stage: f"{task.phase}{task.microbatch}" for task in tick} for tick in ticks]
    return [" ".join(cell.get(stage, ". ") for cell in cells) for stage in range(num_stages)]


@pytest.mark.parametrize(
    ("name", "num_microbatches", "table"),
    [
        *((name, 1, ["F0 B0"]) for name in BOTH),
        *((name, 1, ["F0 .  .  B0", ".  F0 B0 . "]) for name in BOTH),
        ("gpipe", 3, ["F0 F1 F2 B2 B1 B0"]),
        ("gpipe", 4, ["F0 F1 F2 F3 .  .  B3 B2 B1 B0", ".  F0 F1 F2 F3 B3 B2 B1 B0 . "]),
        ("gpipe", 2, ["F0 F1 .  .  .  .  B1 B0", ".  F0 F1 .  .  B1 B0 . ", ".  .  F0 F1 B1 B0 .  . "]),
        ("1f1b", 3, ["F0 B0 F1 B1 F2 B2"]),
        ("1f1b", 4, ["F0 F1 .  B0 F2 B1 F3 B2 .  B3", ".  F0 B0 F1 B1 F2 B2 F3 B3 . "]),
        (
            "1f1b",
            4,
            [
                "F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3",
                ".  F0 F1 .  B0 F2 B1 F3 B2 .  B3 . ",
                ".  .  F0 B0 F1 B1 F2 B2 F3 B3 .  . ",
            ],
        ),
    ],
)
def test_a_schedule_equals_the_table(name: ScheduleName, num_microbatches: int, table: list[str]) -> None:
    assert drawn(name, num_microbatches, len(table)) == table


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(("num_microbatches", "num_stages"), SIZES)
def test_a_task_runs_after_what_it_needs_and_no_stage_does_two(
    num_microbatches: int, num_stages: int, name: ScheduleName
) -> None:
    ticks = timeline(name, num_microbatches, num_stages)
    tick_of = {task: tick for tick, tasks in enumerate(ticks) for task in tasks}
    assert len(ticks) == 2 * (num_microbatches + num_stages - 1)
    assert len(tick_of) == 2 * num_microbatches * num_stages
    assert len({(tick, task.stage) for task, tick in tick_of.items()}) == len(tick_of)
    for task, tick in tick_of.items():
        assert all(tick_of[other] < tick for other in needs(task, num_stages))


@pytest.mark.parametrize(("num_microbatches", "num_stages"), SIZES)
def test_stages_keep_as_many_micro_batches_as_there_are_stages_to_the_last(
    num_microbatches: int, num_stages: int
) -> None:
    to_the_last = [min(num_microbatches, num_stages - stage) for stage in range(num_stages)]
    assert most_in_flight("1f1b", num_microbatches, num_stages) == to_the_last
    assert most_in_flight("gpipe", num_microbatches, num_stages) == [num_microbatches] * num_stages


def launched(name: ScheduleName, num_microbatches: int, num_stages: int) -> str:
    order = launch_order(name, num_microbatches, num_stages)
    return " ".join(f"F{t.microbatch}.{t.stage}" if t.phase == "F" else f"B{t.microbatch}" for t in order)


def test_one_thread_launches_forward_by_stages_and_backward_whole() -> None:
    assert launched("1f1b", 3, 2) == "F0.0 F1.0 F0.1 B0 F2.0 F1.1 B1 F2.1 B2"
    assert launched("gpipe", 3, 2) == "F0.0 F1.0 F0.1 F2.0 F1.1 F2.1 B2 B1 B0"
