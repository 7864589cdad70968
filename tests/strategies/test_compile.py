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

from evener.strategies import DataParallelStrategy, ModelParallelStrategy
from evener.strategies.batch.exact.loss_reader import LossReader
from evener.strategies.batch.exact.plans import OF_SAMPLES, Plan
from evener.strategies.batch.exact.values import Leaf, Program


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
@pytest.mark.parametrize("plan", ["dp-1", "dp-2", "balanced_dp-weights=1,0,3", "model_parallel-2-3"])
def test_a_compiled_module_trains_as_the_plain_one(plan: str) -> None:
    torch._dynamo.reset()
    GRAPHS.clear()
    num_devices, strategy = PLANS[plan]
    assert_equal(run(Case(CompiledNet), strategy(), devices=num_devices), baseline(Case(Net)), 1e-10)
    assert GRAPHS


class CompiledPart(Net):
    """Compiles a part of itself, and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = torch.compile(self.net, backend=count_and_run)


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_module_with_a_compiled_part_trains_in_micro_batches() -> None:
    # the compiler traced what looks at the first micro-batch, and failed with an AssertionError
    torch._dynamo.reset()
    GRAPHS.clear()
    found = run(Case(CompiledPart), ModelParallelStrategy(num_microbatches=2), devices=1)
    torch.testing.assert_close(found.weights, baseline(Case(Net)).weights, rtol=0, atol=1e-10)
    assert GRAPHS


class CompiledSum(Net):
    """Its loss is a mean over samples, as a trial of some samples shows."""

    def __init__(self) -> None:
        super().__init__()
        self.summed = torch.compile(_squares, backend=_count_runs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        CALLS.append("step")
        return self.summed(self(batch[0])) / len(batch[0])


def _squares(values: Tensor) -> Tensor:
    return values.square().sum()


def _count_runs(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    def run(*args: Tensor) -> Any:
        CALLS.append("compiled")
        return graph(*args)

    return run


CALLS: list[str] = []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_what_is_compiled_stays_so_after_a_trial_of_the_loss() -> None:
    # Cause: the trial ran under a dispatch mode, for which torch leaves out a compiled function, then and later.
    torch._dynamo.reset()
    CALLS.clear()
    run(Case(CompiledSum), DataParallelStrategy(), devices=2)
    assert len(CALLS) - 2 * CALLS.count("compiled") > 0  # the trial compiles nothing
    assert CALLS[-8:].count("compiled") == 4


def test_a_compiled_step_whose_loss_must_be_read_is_told_to_run_uncompiled(caplog: pytest.LogCaptureFixture) -> None:
    reader, module = LossReader("ddp"), Net()
    module._compiler_ctx = {"compiler": "dynamo"}
    with caplog.at_level("INFO"):
        reader.take(OF_SAMPLES, module)
        assert caplog.text == ""
        reader.take(Plan(Program((Leaf((), 0, "sum", (), torch.float32),), (), None), 0), module)
    assert "ddp: training steps run uncompiled, since what their loss divides by can't be read" in caplog.text
