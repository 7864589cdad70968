"""Schedule micro-batches on stages. Pure functions: no module, no device, no clock."""

from collections import deque
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias

ScheduleName: TypeAlias = Literal["1f1b", "gpipe"]
"""Order of the work on each stage; see `stage_order`."""

Phase: TypeAlias = Literal["F", "B"]
"""`F` is forward, `B` is backward."""


class Task(NamedTuple):
    """One micro-batch on one stage, in one direction."""

    phase: Phase
    microbatch: int
    stage: int

    def follows(self, num_stages: int) -> "Task | None":
        """The task on another stage that has to be done before this one; None for the first in its direction."""
        stage = self.stage - 1 if self.phase == "F" else self.stage + 1
        return self._replace(stage=stage) if 0 <= stage < num_stages else None


def stage_order(name: ScheduleName, num_microbatches: int, num_stages: int, stage: int) -> list[Task]:
    """List the tasks of one stage, in order.

    `1f1b`: a stage runs forward as many micro-batches as there are stages from it to the last; then one backward, one
    forward, and so on. So stage s keeps the activations of at most k − s micro-batches.

    `gpipe`: all forward, then all backward, the last one first. Every stage keeps the activations of all micro-batches.

    With 4 micro-batches on 2 stages, where each task runs as soon as what it needs is done:

    ```
    1f1b      0   1   2   3   4   5   6   7   8   9     gpipe     0   1   2   3   4   5   6   7   8   9
    stage 0   F0  F1  .   B0  F2  B1  F3  B2  .   B3    stage 0   F0  F1  F2  F3  .   .   B3  B2  B1  B0
    stage 1   .   F0  B0  F1  B1  F2  B2  F3  B3  .     stage 1   .   F0  F1  F2  F3  B3  B2  B1  B0  .
    ```

    Args:
        num_microbatches: number of micro-batches, m.
        num_stages: number of stages, k.

    Source: PipeDream-Flush (Narayanan et al., 2020, arXiv:2006.09503), figure 3; GPipe (Huang et al., 2019,
    arXiv:1811.06965), figure 2c.
    """
    forward = [Task("F", i, stage) for i in range(num_microbatches)]
    if name == "gpipe":
        return forward + [Task("B", task.microbatch, stage) for task in reversed(forward)]
    ahead = num_stages - stage
    order = forward[:ahead]
    for i in range(num_microbatches):
        order += [Task("B", i, stage), *forward[ahead + i : ahead + i + 1]]
    return order


def launch_order(name: ScheduleName, num_microbatches: int, num_stages: int) -> list[Task]:
    """Put the tasks of all stages in one order, for a single thread that queues the work of devices.

    A backward pass is launched whole, through all stages; it stands for its task on the last stage. Each stage gets its
    tasks in the order of `stage_order`.
    """
    orders = [deque(stage_order(name, num_microbatches, num_stages, stage)) for stage in range(num_stages)]
    launched: list[Task] = []
    done: set[Task] = set()
    while any(orders):
        heads = [order for order in orders if order[0].phase == "F"]
        ready = [order for order in heads if order[0].follows(num_stages) in {None, *done}]
        launched += [order.popleft() for order in ready]
        done.update(launched)
        if all(order[0].phase == "B" and order[0].microbatch == orders[0][0].microbatch for order in orders):
            launched.append([order.popleft() for order in orders][-1])
    return launched


def most_in_flight(name: ScheduleName, num_microbatches: int, num_stages: int) -> list[int]:
    """The largest number of micro-batches between forward and backward, by stage, as a schedule has them."""
    orders = [stage_order(name, num_microbatches, num_stages, stage) for stage in range(num_stages)]
    return [max(accumulate(1 if task.phase == "F" else -1 for task in order)) for order in orders]
