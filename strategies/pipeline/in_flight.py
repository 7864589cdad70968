"""Count what a schedule of micro-batches costs: time, and micro-batches whose activations a stage keeps."""

from itertools import accumulate

from ._schedule import ScheduleName, stage_order


def most_in_flight(name: ScheduleName, num_microbatches: int, num_stages: int) -> list[int]:
    """The largest number of micro-batches between forward and backward, by stage, as a schedule has them."""
    orders = [stage_order(name, num_microbatches, num_stages, stage) for stage in range(num_stages)]
    return [max(accumulate(1 if task.phase == "F" else -1 for task in order)) for order in orders]


def num_ticks(num_microbatches: int, num_stages: int) -> int:
    """The time of a forward pass through all stages, in units of one micro-batch on one stage."""
    return num_microbatches + num_stages - 1
