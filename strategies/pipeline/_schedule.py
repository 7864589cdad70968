"""Schedule micro-batches on stages. A pure generator: no module, no device, no clock."""

from collections.abc import Iterator
from typing import Literal, NamedTuple


class Task(NamedTuple):
    """One micro-batch on one stage, in one direction."""

    phase: Literal["F", "B"]
    """`F` is forward, `B` is backward."""
    microbatch: int
    stage: int


def schedule(num_microbatches: int, num_stages: int) -> Iterator[list[Task]]:
    """Yield, tick by tick, the tasks that run in parallel.

    Every micro-batch runs forward through all stages; then all run backward, the last one first, so that the stage
    that finished forward last starts backward first. With 4 micro-batches on 2 stages:

    ```
    tick      0   1   2   3   4   5   6   7   8   9
    stage 0   F0  F1  F2  F3  .   .   B3  B2  B1  B0
    stage 1   .   F0  F1  F2  F3  B3  B2  B1  B0  .
    ```

    Args:
        num_microbatches: number of micro-batches, m.

    Yields:
        The tasks of one tick, ordered by stage; 2·(m + k − 1) ticks in all.

    Source: GPipe (Huang et al., 2019, arXiv:1811.06965), figure 2c.
    """
    num_ticks = num_microbatches + num_stages - 1
    forward = [
        [Task("F", tick - stage, stage) for stage in range(num_stages) if 0 <= tick - stage < num_microbatches]
        for tick in range(num_ticks)
    ]
    yield from forward
    for tasks in reversed(forward):
        yield [Task("B", task.microbatch, task.stage) for task in tasks]
