"""The public primitives, on CPUs, against one call of the module."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.strategies import ConfigError, data_parallel, gather, parallel_apply, replicate, scatter
from evener.strategies.core.module_checks import is_compiled
from evener.strategies.replicas.runner import ReplicaRunner, allow_recompiling


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.lock = threading.Lock()

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Any]:
        out = self.b(torch.tanh(self.a(x)))
        return {"out": out if scale is None else out * scale, "mean": (out.mean(),)}


@pytest.fixture
def module() -> Tied:
    torch.manual_seed(0)
    return Tied().double()


X = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradients(module: nn.Module, loss: Tensor) -> list[Tensor | None]:
    module.zero_grad()
    loss.backward()
    return [p.grad for p in module.parameters()]


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_scatter_takes_chunk_sizes() -> None:
    chunks = scatter({"x": torch.arange(5), "name": list("abcde")}, ["cpu", "cpu", "cpu"], chunk_sizes=[1, 0, 4])
    assert [chunk["x"].tolist() for chunk in chunks] == [[0], [], [1, 2, 3, 4]]
    assert [chunk["name"] for chunk in chunks] == [["a"], [], ["b", "c", "d", "e"]]


def test_scatter_and_gather_are_differentiable_and_scalars_become_a_vector() -> None:
    x = torch.arange(5.0, requires_grad=True)
    whole = gather([chunk * (i + 1) for i, chunk in enumerate(scatter(x, ["cpu", "cpu"]))], "cpu")
    assert whole.tolist() == [0, 1, 2, 6, 8]
    whole.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1, 1, 2, 2]
    assert gather([torch.tensor(1.0), torch.tensor(2.0)], "cpu").tolist() == [1, 2]


def test_replicas_send_gradients_to_the_module_unless_they_are_detached(module: Tied) -> None:
    first, second = replicate(module, ["cpu", "cpu"])
    assert first.b.weight is first.a.weight
    found = gradients(module, first(X)["out"].sum() + 2 * second(X)["out"].sum())
    assert len(found) == 3
    assert_close(found, gradients(module, 3 * module(X)["out"].sum()))
    (detached,) = replicate(module, ["cpu"], detach=True)
    assert not detached(X)["out"].requires_grad


@pytest.mark.parametrize("sizes", [None, [0, 3, 4]])
def test_data_parallel_equals_one_call(module: Tied, sizes: list[int] | None) -> None:
    scale = torch.linspace(1, 2, 7, dtype=torch.float64)[:, None]
    whole = data_parallel(module, X, ["cpu"] * 3, module_kwargs={"scale": scale}, chunk_sizes=sizes)["out"]
    expected = module(X, scale)["out"]
    assert_close(whole, expected)
    assert_close(gradients(module, whole.square().sum()), gradients(module, expected.square().sum()))


def test_parallel_apply_names_the_chunk_that_failed(module: Tied) -> None:
    with pytest.raises(RuntimeError, match=r"chunk 2 of 2 on cpu") as caught:
        parallel_apply([module, module], [X, X[:, :2]])
    assert "mat1 and mat2" in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scatter(X, ["cpu", "cpu"], chunk_sizes=[3, 3]), r"chunk_sizes=\[3, 3\] do not divide 7 samples"),
        (lambda: scatter(X, ["cpu", "cpu"], dim=1), "dim=1 is not supported"),
        (lambda: scatter(3, ["cpu"]), "a value of type int has no samples to split"),
        (lambda: parallel_apply([nn.Identity()], [X, X]), "1 modules, 2 inputs"),
        (lambda: gather(["a", "b"], "cpu"), "an output of type str is not a tensor"),
    ],
)
def test_bad_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_a_compiled_module_may_be_compiled_for_every_device() -> None:
    """Torch stops compiling a function after eight times, and a replica on another device is one."""
    from torch._dynamo import config

    with config.patch(recompile_limit=8):  # pytest's monkeypatch would leave it deleted
        plain = nn.Sequential(nn.Linear(2, 2))
        ReplicaRunner(plain, [torch.device("cpu")] * 2).close()
        assert config.recompile_limit == 8
        allow_recompiling(4)
        assert config.recompile_limit == 32
    assert not is_compiled(plain)
    plain[0].compile(backend="eager")
    assert is_compiled(plain)
