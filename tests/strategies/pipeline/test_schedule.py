"""The schedule, against tables drawn by hand."""

import pytest

from evener.strategies.pipeline._schedule import Task, schedule


def drawn(num_microbatches: int, num_stages: int) -> list[str]:
    ticks = list(schedule(num_microbatches, num_stages))
    cells = [{task.stage: f"{task.phase}{task.microbatch}" for task in tick} for tick in ticks]
    return [" ".join(cell.get(stage, ". ") for cell in cells) for stage in range(num_stages)]


@pytest.mark.parametrize(
    ("num_microbatches", "num_stages", "table"),
    [
        (1, 1, ["F0 B0"]),
        (1, 2, ["F0 .  .  B0", ".  F0 B0 . "]),
        (3, 1, ["F0 F1 F2 B2 B1 B0"]),
        (
            4,
            2,
            [
                "F0 F1 F2 F3 .  .  B3 B2 B1 B0",
                ".  F0 F1 F2 F3 B3 B2 B1 B0 . ",
            ],
        ),
        (
            2,
            3,
            [
                "F0 F1 .  .  .  .  B1 B0",
                ".  F0 F1 .  .  B1 B0 . ",
                ".  .  F0 F1 B1 B0 .  . ",
            ],
        ),
    ],
)
def test_schedule_equals_the_table(num_microbatches: int, num_stages: int, table: list[str]) -> None:
    assert drawn(num_microbatches, num_stages) == table


def test_a_tick_lists_its_tasks_by_stage() -> None:
    ticks = list(schedule(4, 2))
    assert ticks[1] == [Task("F", 1, 0), Task("F", 0, 1)]
    assert ticks[8] == [Task("B", 1, 0), Task("B", 0, 1)]


@pytest.mark.parametrize("num_microbatches", range(1, 7))
@pytest.mark.parametrize("num_stages", range(1, 5))
def test_a_task_runs_after_what_it_needs_and_no_stage_does_two(num_microbatches: int, num_stages: int) -> None:
    tick_of = {task: tick for tick, tasks in enumerate(schedule(num_microbatches, num_stages)) for task in tasks}
    assert len(tick_of) == 2 * num_microbatches * num_stages
    assert len({(tick, task.stage) for task, tick in tick_of.items()}) == len(tick_of)
    for phase, microbatch, stage in tick_of:
        here = tick_of[Task(phase, microbatch, stage)]
        if phase == "F" and stage > 0:
            assert here == tick_of[Task("F", microbatch, stage - 1)] + 1
        if phase == "B" and stage < num_stages - 1:
            assert here == tick_of[Task("B", microbatch, stage + 1)] + 1
        if phase == "B":
            assert here > tick_of[Task("F", microbatch, stage)]
