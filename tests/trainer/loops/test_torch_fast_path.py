"""Backward, `zero_grad` and optimizer step without their wrappers do what torch's do, hooks and patches included."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recording import SmallModule, loader
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from evener.trainer import Trainer
from evener.trainer.loops._train_step import PlainOptimizer, backward_of

KINDS: list[Callable[..., Optimizer]] = [SGD, Adam, AdamW, RMSprop]


def weights_after(kind: Callable[..., Optimizer], wrap: Callable[[Optimizer], Any], bring_back: Any) -> list[Tensor]:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2, dtype=torch.float64)
    optimizer = kind(layer.parameters(), lr=0.1, weight_decay=0.01)
    stepper = wrap(optimizer)
    for _ in range(4):
        loss = layer(torch.randn(5, 3, dtype=torch.float64)).square().mean()
        stepper.zero_grad()
        bring_back(loss)
        stepper.step()
    return [parameter.detach() for parameter in layer.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_bitwise_torchs(kind: Callable[..., Optimizer]) -> None:
    ours = weights_after(kind, PlainOptimizer, backward_of())
    torchs = weights_after(kind, lambda optimizer: optimizer, Tensor.backward)
    for mine, theirs in zip(ours, torchs, strict=True):
        assert torch.equal(mine, theirs)


def one_parameter() -> tuple[torch.nn.Parameter, SGD]:
    parameter = torch.nn.Parameter(torch.ones(()))
    return parameter, SGD([parameter], lr=0.25)


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_hook_that_comes_late_is_called(register: str) -> None:
    parameter, optimizer = one_parameter()
    plain = PlainOptimizer(optimizer)
    assert plain.steps_plainly
    calls: list[str] = []
    getattr(optimizer, register)(lambda *_: calls.append(register))
    parameter.grad = torch.ones(())
    plain.step()
    assert calls == [register]
    assert parameter.item() == 0.75


def test_a_profiler_sees_step_and_zero_grad() -> None:
    parameter, optimizer = one_parameter()
    plain = PlainOptimizer(optimizer)
    parameter.grad = torch.ones(())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        plain.step()
        plain.zero_grad()
    names = {event.key for event in profiler.key_averages()}
    assert {"Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"} <= names
    assert parameter.grad is None


def test_a_scheduler_sees_that_the_optimizer_stepped_first() -> None:
    parameter, optimizer = one_parameter()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    parameter.grad = torch.ones(())
    plain = PlainOptimizer(optimizer)
    assert plain.steps_plainly
    plain.step()
    scheduler.step()  # would warn, and warnings are errors here
    assert optimizer.param_groups[0]["lr"] == 0.025


def test_unknown_optimizers_and_patched_ones_step_themselves() -> None:
    class Own(SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    parameter, optimizer = one_parameter()
    assert not PlainOptimizer(Own([parameter], lr=1.0)).steps_plainly
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    assert not PlainOptimizer(optimizer).steps_plainly


def test_a_step_patched_during_fit_is_called_from_the_next_look_at_hooks_on() -> None:
    calls: list[int] = []

    class Patching(SmallModule):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                optimizer: Any = self.trainer.optimizers[0]
                original = optimizer.step
                optimizer.step = lambda *a, **k: calls.append(batch_idx) or original(*a, **k)

    trainer = Trainer(
        accelerator="cpu", max_epochs=1, log_every_n_steps=10, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Patching(), loader(48), loader())
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (torch.ones(2, requires_grad=True) * 1, "scalar outputs"),
        (torch.ones(()), "does not require grad"),
        (torch.ones((), dtype=torch.complex64, requires_grad=True) * 1, "real scalar"),
    ],
)
def test_a_loss_that_can_not_be_brought_back_is_refused_by_torch(loss: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        backward_of()(loss)


def test_a_patched_backward_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    monkeypatch.setattr(Tensor, "backward", calls.append)
    loss = torch.ones((), requires_grad=True) * 1
    backward_of()(loss)
    assert calls[0] is loss
