"""Count what a schedule of micro-batches costs: time, and micro-batches whose activations a stage keeps."""

from ._schedule import ScheduleName, schedule


def most_in_flight(name: ScheduleName, num_microbatches: int, num_stages: int) -> list[int]:
    """The largest number of micro-batches between forward and backward, by stage, as a schedule has them."""
    now, most = [0] * num_stages, [0] * num_stages
    for tick in schedule(name, num_microbatches, num_stages):
        for task in tick:
            now[task.stage] += 1 if task.phase == "F" else -1
            most[task.stage] = max(most[task.stage], now[task.stage])
    return most


def num_ticks(num_microbatches: int, num_stages: int) -> int:
    """The time of a forward pass through all stages, in units of one micro-batch on one stage."""
    return num_microbatches + num_stages - 1
