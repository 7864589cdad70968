"""A compiled module trains under every strategy as the plain one does on one device.

The backend is the one that compiles nothing to machine code: it shows which module and which parameters the compiled
calls use, and leaves the arithmetic, and its errors, to torch.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import Case, Net, assert_equal, baseline, run
from plans import PLANS
from torch import Tensor


def count_and_run(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    GRAPHS.append(graph)
    return graph.forward


GRAPHS: list[torch.fx.GraphModule] = []


class CompiledNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.compile(backend=count_and_run)


@pytest.mark.timeout(600)
# the compiler looks at it, and hides the warning, which does not help where warnings are errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("plan", ["dp-1", "dp-2", "balanced_dp-weights=1,0,3", "model_parallel-2-3-threads"])
def test_a_compiled_module_trains_as_the_plain_one(plan: str) -> None:
    torch._dynamo.reset()
    GRAPHS.clear()
    num_devices, strategy = PLANS[plan]
    assert_equal(run(Case(CompiledNet), strategy(), devices=num_devices), baseline(Case(Net)), 1e-10)
    assert GRAPHS
