"""Steps without torch's wrappers of backward, `zero_grad` and `step` do what torch's do, hooks and patches included."""

from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from recording import loader
from tiny import Tiny, quiet
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from evener.trainer import Trainer


class Own(SGD):
    """An optimizer of the user's."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Stepped(Tiny):
    """Its scheduler steps after each batch, and would warn (an error here) if it did not see the optimizer step."""

    def __init__(self, kind: Callable[..., Optimizer] = SGD, late: Callable[[Any, Any], Any] | None = None) -> None:
        super().__init__(4)
        self.kind, self.late = kind, late
        self.calls: list[int] = []

    def note(self, *_: Any) -> None:
        self.calls.append(self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = self.kind(self.parameters(), lr=0.1, weight_decay=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.late is not None:
            self.late(self, self.trainer.optimizers[0])


def fitted(module: Stepped, kind: type[pl.Trainer] = Trainer, **options: Any) -> Stepped:
    for parameter in module.parameters():
        torch.nn.init.ones_(parameter)
    quiet(kind, **options).fit(module, loader(48))
    return module


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW, RMSprop, Own])
def test_steps_are_bitwise_torchs(kind: Callable[..., Optimizer]) -> None:
    ours, lightnings = (fitted(Stepped(kind), trainer) for trainer in (Trainer, pl.Trainer))
    assert torch.equal(ours.layer.weight, lightnings.layer.weight)


def patch_step(module: Stepped, optimizer: Any) -> None:
    original = optimizer.step
    optimizer.step = lambda *args, **kwargs: module.note() or original(*args, **kwargs)


LATE: dict[str, tuple[Callable[[Stepped, Any], Any], int]] = {
    "a pre-hook": (lambda module, optimizer: optimizer.register_step_pre_hook(module.note), 10),
    "a post-hook": (lambda module, optimizer: optimizer.register_step_post_hook(module.note), 10),
    "a patched step, from the next look at hooks on": (patch_step, 2),
}


@pytest.mark.parametrize("name", LATE)
def test_what_comes_late_is_called(name: str) -> None:
    late, num_calls = LATE[name]
    assert len(fitted(Stepped(late=late), log_every_n_steps=10).calls) == num_calls  # of 12 batches


class Looks(Stepped):
    """Its optimizer has a hook, registered before training, that looks at a gradient."""

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        made[0][0].register_step_pre_hook(lambda *_: self.calls.append(int(self.layer.weight.grad is not None)))
        return made


@pytest.mark.parametrize("kind", [Trainer, pl.Trainer])
def test_a_pre_hook_runs_before_the_closure_as_under_lightning(kind: type[pl.Trainer]) -> None:
    assert fitted(Looks(), kind).calls == [0, *[1] * 11]  # the gradient of the step before


def test_a_profiler_sees_step_and_zero_grad() -> None:
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    fitted(Stepped(late=lambda *_: profiler.start()))
    profiler.stop()
    names = {event.key: event.count for event in profiler.key_averages()}
    assert names["Optimizer.step#SGD.step"] == names["Optimizer.zero_grad#SGD.zero_grad"] == 10


def test_a_patched_backward_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    original = Tensor.backward
    monkeypatch.setattr(Tensor, "backward", lambda loss, *args, **kwargs: calls.append(loss) or original(loss))
    fitted(Stepped())
    assert len(calls) == 12
