"""Hooks compute with shards what one device computes with whole tensors, or are refused by name."""

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed import RankError, run_ranks, run_script
from pytorch_lightning.utilities import grad_norm
from regression import Net, Numbered, quiet_trainer, refusal, weights, whole
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader

from evener.strategies import FSDPStrategy, SingleDeviceStrategy


class Hooked(Net):
    """Holds what hooks combine with its parameters: plain tensors, and clones that are made when it is cut already."""

    def __init__(self, **hooks: dict[str, Callable[["Hooked"], Any]]) -> None:
        super().__init__()
        self.hooks, self.found, self.extra = hooks, dict[str, Tensor](), 0.0
        self.register_buffer("average", torch.zeros(4, 3, dtype=torch.float64))
        self.start = [parameter.detach().clone() for parameter in self.parameters()]
        self.start_state = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        self.mask = (torch.arange(12).reshape(4, 3) % 3 > 0).double()

    @property
    def weight(self) -> nn.Parameter:
        return self.net[0].weight  # type: ignore[return-value]

    def run(self, hook: str) -> None:
        for name, function in self.hooks.get(hook, {}).items():
            value = function(self)
            value = weights(self) if value is None else whole(torch.as_tensor(value)).detach().clone()
            self.found[f"{self.trainer.global_step} {name}"] = value

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.extra = 0.0
        self.run("step")
        return super().training_step(batch, batch_idx) + self.extra

    def on_fit_start(self) -> None:
        self.anchor = [parameter.detach().clone() for parameter in self.parameters()]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.run("start")

    def on_after_backward(self) -> None:
        self.run("backward")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.run("end")

    def on_validation_epoch_end(self) -> None:
        self.run("validation_end")


def average_of_clones(m: Hooked) -> Tensor:
    for clone, parameter in zip(m.anchor, m.parameters(), strict=True):
        clone.lerp_(parameter.data, 0.1)
    return torch.cat([whole(clone).flatten() for clone in m.anchor])


def logged(m: Hooked) -> float:
    m.log("norm", m.weight.norm(), on_step=False, on_epoch=True)
    return 0.0


READS: dict[str, Callable[[Hooked], Any]] = {
    "average of clones": average_of_clones,
    "average in a buffer": lambda m: m.average.mul_(0.9).add_(m.weight.detach(), alpha=0.1),
    "norms as numbers": lambda m: sum(p.norm().item() for p in m.parameters()),
    "total norm": lambda m: nn.utils.get_total_norm(list(m.parameters())),
    "share of small ones": lambda m: sum((p.abs() < 0.1).sum() for p in m.parameters()) / 21,
    "whole": lambda m: torch.linalg.svdvals(whole(m.weight)),
    "equal": lambda m: float(sum(torch.equal(p, q) for p in m.parameters() for q in (*m.parameters(), p + 1))),
    "optimizer state": lambda m: sum(s["exp_avg"].norm() for s in m.trainer.optimizers[0].state.values()),
    "logged": logged,
}


def moved_back(m: Hooked) -> None:
    for start, parameter in zip(m.start, m.parameters(), strict=True):
        parameter.data.mul_(0.9).add_(start, alpha=0.1)


def clipped(m: Hooked) -> None:
    for parameter in m.parameters():
        parameter.data.clamp_(-0.5, 0.5)


def saved_and_loaded(m: Hooked) -> None:
    best = copy.deepcopy(m.state_dict())
    m.weight.data.zero_()
    m.load_state_dict(best)


def whole_state_loaded(m: Hooked) -> None:
    m.load_state_dict(m.start_state)


def averaged(m: Hooked) -> None:
    """The moving average of tutorials, and values that every rank has whole."""
    m.net[0].weight.data = m.net[0].weight.data * 0.9 + m.weight.data.norm() * 0.01
    m.net[0].bias.data = torch.full_like(m.start[1], 0.2)


WRITES: dict[str, Callable[[Hooked], Any]] = {
    "moved back": moved_back,
    "clipped": clipped,
    "masked": lambda m: m.weight.data.mul_(m.mask),
    "orthogonal": lambda m: m.weight.data.copy_(torch.linalg.qr(whole(m.weight.data))[0]),
    "best state": saved_and_loaded,
    "whole state": whole_state_loaded,
    "averaged": averaged,
}


def gradients_changed(m: Hooked) -> Tensor:
    gradient: Any = m.weight.grad
    if m.trainer.global_step % 2:
        gradient.mul_(m.mask)
        m.net[2].bias.grad = None  # type: ignore[assignment]
    for parameter in m.parameters():
        if parameter.grad is not None:
            parameter.grad += 0.1 * parameter.data
    clip_grad_value_(m.parameters(), 0.2)
    norm = clip_grad_norm_(m.parameters(), 0.3)
    return norm + sum(grad_norm(m, 2).values())


def written_in_step(m: Hooked) -> Tensor:
    with torch.no_grad():
        m.weight.clamp_(-0.6, 0.6)
    m.weight.data.mul_(0.9)
    return m.weight.detach().norm()


def written_through_optimizer(m: Hooked) -> None:
    """What the optimizer holds are shards in a step, too; the module goes on with what was written."""
    for parameter in m.trainer.optimizers[0].param_groups[0]["params"]:
        parameter.data.clamp_(-0.3, 0.3)


def data_set(m: Hooked) -> None:
    for start, parameter in zip(m.start, m.parameters(), strict=True):
        parameter.data = 0.5 * start + 0.5 * parameter.data


def row_written(m: Hooked) -> None:
    m.weight.data[3] = 0.1


def penalized(m: Hooked) -> float:
    m.extra = sum((p - a).pow(2).sum() for p, a in zip(m.net.parameters(), m.start, strict=True))  # type: ignore[assignment]
    return 0.0


IN_STEPS: dict[str, Any] = {
    "in steps": {"step": {"written": written_in_step}},
    "through the optimizer": {"step": {"written": written_through_optimizer}},
}
HOOKS: dict[str, Any] = {
    "reads": {"end": READS, "validation_end": READS},
    "writes": {"end": WRITES},
    "gradients": {"backward": {"gradients": gradients_changed}},
    **IN_STEPS,
}
WHOLE_STEP: dict[str, Any] = {
    "set in steps": {"step": {"data": data_set, "row": row_written}},
    "penalized": {"step": {"penalty": penalized}},
    **IN_STEPS,
}


def _trained(num_ranks: int, ways: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    torch.set_default_dtype(torch.float64)
    found = {}
    for options in ways:
        for name, hooks in (WHOLE_STEP if "shard" in options else HOOKS).items():
            module = Hooked(**hooks)
            strategy = SingleDeviceStrategy() if num_ranks == 1 else FSDPStrategy(batch_size_is="global", **options)
            trainer = quiet_trainer(strategy, num_ranks, max_epochs=1, limit_train_batches=3, limit_val_batches=1)
            trainer.fit(module, DataLoader(Numbered(), 6), DataLoader(Numbered(11), 4))
            own = module.found | {"weights": weights(module)} | trainer.callback_metrics
            found |= {f"{options}, {name}, {key}": value for key, value in own.items()}
    return found


@pytest.mark.parametrize(
    ("num_ranks", "ways"),
    [(2, [{}, {"shard": []}]), (3, [{}]), pytest.param(4, [{"replicas": 2}], marks=pytest.mark.slow)],
)
def test_hooks_see_and_change_what_they_do_on_one_device(num_ranks: int, ways: list[dict[str, Any]]) -> None:
    (expected,) = run_ranks(_trained, 1, 1, ways)
    for found in run_ranks(_trained, num_ranks, num_ranks, ways):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def replaced_parameter(m: Hooked) -> None:
    m.net[0].weight = nn.Parameter(m.start[0])


def plain_gradient(m: Hooked) -> None:
    m.weight.grad = torch.full((4, 3), 0.1, dtype=torch.float64)


def plain_average(m: Hooked) -> None:
    m.average = 0.9 * m.average + 0.1 * m.weight


NEEDS_WHOLE: dict[str, Callable[[Hooked], Any]] = {
    "__getitem__": lambda m: m.weight[3, 2].item(),
    "mean": lambda m: m.weight.mean(),
    "view": lambda m: m.weight.data.view(-1)[5:8].mul_(0.5),
    "rmul_or_add": plain_average,
    "__reduce_ex__": lambda m: torch.save(m.state_dict(), io.BytesIO()),
    "data = ": data_set,
    "grad = ": plain_gradient,
}
REFUSED: dict[str, tuple[Callable[[Hooked], Any], str]] = {
    **{name: (function, r"fsdp: `\w+( = )?` is called with a parameter, ") for name, function in NEEDS_WHOLE.items()},
    "replaced": (replaced_parameter, "fsdp: net.0.weight was added, or replaced by another parameter, after the"),
}


def _refusals(num_ranks: int) -> list[str]:
    told = []
    for name, (function, _) in REFUSED.items():
        trainer = quiet_trainer(FSDPStrategy(batch_size_is="global", verify=False), num_ranks, max_epochs=1)
        hooks = {"backward" if name == "grad = " else "start": {"refused": function}}
        said = refusal(trainer, Hooked(**hooks), DataLoader(Numbered(), 6))
        told.append(f"{trainer.global_step}: {said}")
    return told


def test_what_shards_cannot_do_is_refused_by_name() -> None:
    # Torch answers some of them with what one rank has, writes others to a copy, or to the wrapper alone.
    for told in run_ranks(_refusals, 2, 2):
        for message, (_, pattern) in zip(told, REFUSED.values(), strict=True):
            assert re.match(f"0: {pattern}", message), message


class OnFirstRank(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.net[0].weight.detach().norm()


def _on_first_rank() -> None:
    quiet_trainer(FSDPStrategy(timeout_s=8), 2).fit(OnFirstRank(), DataLoader(Numbered(12), 2))


def test_a_norm_that_one_rank_asks_for_alone_is_named_when_it_has_waited_for_the_others() -> None:
    # its all-reduce would have met another collective of the other rank
    line = r"test_shard_calls.py:\d+ in on_train_batch_end"
    with pytest.raises(RankError, match=f"rank 0 waited 8 s at '{line}': rank 1 did not arrive; it was at step 1, "):
        run_script(_on_first_rank)
