"""A compiled module trains under every strategy as the plain one does on one device.

The backend is the one that compiles nothing to machine code: it shows which module and which parameters the compiled
calls use, and leaves the arithmetic, and its errors, to torch.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import PLANS, Case, Net, assert_equal, baseline, fit, make_module, run
from torch import Tensor

from evener.strategies import DataParallelStrategy
from evener.strategies.replicas.layout import allow_recompiling

pytestmark = [
    # the compiler looks at it, and hides the warning, which does not help where warnings are errors
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks"),
]


def count_runs(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    return lambda *args: (CALLS.append("compiled"), graph(*args))[1]


CALLS: list[str] = []


class CompiledNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.compile(backend=count_runs)


class CompiledPart(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = torch.compile(self.net, backend=count_runs)


class CompiledInPlace(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net.compile(backend=count_runs)


@pytest.mark.parametrize("plan", ["dp-2", "balanced_dp-weights=1,0,3", "model_parallel-2-3"])
@pytest.mark.parametrize("module", [CompiledNet, CompiledPart, CompiledInPlace])
def test_a_compiled_module_trains_as_the_plain_one(module: type[Net], plan: str) -> None:
    # the compiler traced what looks at the first micro-batch, and failed with an AssertionError
    torch._dynamo.reset()
    CALLS.clear()
    num_devices, strategy = PLANS[plan]
    found, expected = run(Case(module), strategy(), devices=num_devices), baseline(Case(Net))
    found.keys = expected.keys if module is CompiledPart else found.keys  # torch.compile's own prefix
    assert_equal(found, expected, 1e-10)
    assert CALLS or module is CompiledInPlace


class CompiledSum(Net):
    """Its loss is a mean over samples, as a trial of some samples shows."""

    def __init__(self) -> None:
        super().__init__()
        self.summed = torch.compile(_squares, backend=count_runs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        CALLS.append("step")
        return self.summed(self(batch[0])) / len(batch[0])


def _squares(values: Tensor) -> Tensor:
    return values.square().sum()


def test_what_is_compiled_stays_so_after_a_trial_of_the_loss() -> None:
    # Cause: the trial ran under a dispatch mode, for which torch leaves out a compiled function, then and later.
    torch._dynamo.reset()
    CALLS.clear()
    run(Case(CompiledSum), DataParallelStrategy(), devices=2)
    assert CALLS.count("step") > CALLS.count("compiled")  # the trial compiles nothing
    assert CALLS[-8:].count("compiled") == 4


class Weights(Net):
    """Divides by the sum of its classes' weights, which is read in the step."""

    def loss(self, batch: Any) -> Tensor:
        weight = torch.tensor([1.0, 2.0, 3.0], dtype=batch[0].dtype)
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1], weight=weight)


def test_a_compiled_step_whose_loss_must_be_read_is_told_to_run_uncompiled(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    module = make_module(Case(Weights))
    with caplog.at_level("INFO"):
        fit(Case(Weights), torch.compile(module, backend=count_runs), DataParallelStrategy())  # type: ignore[arg-type]
    assert "training steps run uncompiled, since what their loss divides by can't be read" in caplog.text
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    torch.testing.assert_close(weights, baseline(Case(Weights)).weights, rtol=0, atol=1e-10)


def test_a_compiled_module_may_be_compiled_for_every_device() -> None:
    """Torch stops compiling a function after eight times, and a replica on another device is one."""
    from torch._dynamo import config

    with config.patch(recompile_limit=8):  # pytest's monkeypatch would leave it deleted
        allow_recompiling(4)
        assert config.recompile_limit == 32
