"""Hooks compute with shards what one device computes with whole tensors, or are refused by name."""

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed import run_ranks
from pytorch_lightning.utilities import grad_norm
from regression import Net, Numbered, quiet_trainer, weights, whole
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader

from evener.strategies import ConfigError, FSDPStrategy, SingleDeviceStrategy


class Hooked(Net):
    """Holds what hooks combine with its parameters: plain tensors, and clones that are made when it is cut already."""

    def __init__(self, **hooks: dict[str, Callable[["Hooked"], Any]]) -> None:
        super().__init__()
        self.hooks, self.found, self.extra = hooks, dict[str, Tensor](), 0.0
        self.register_buffer("average", torch.zeros(4, 3, dtype=torch.float64))
        self.start = [parameter.detach().clone() for parameter in self.parameters()]
        self.start_state = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        self.mask = (torch.arange(12).reshape(4, 3) % 3 > 0).double()
        self.kept: list[Any] = []

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
        self.row = self.weight.data[3]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.run("start")

    def on_after_backward(self) -> None:
        self.run("backward")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.run("end")

    def on_validation_epoch_start(self) -> None:
        self.run("validation_start")

    def on_validation_epoch_end(self) -> None:
        self.run("validation_end")


def average_in_place(m: Hooked) -> Tensor:
    return m.average.mul_(0.9).add_(m.weight.detach(), alpha=0.1)


def average_anew(m: Hooked) -> Tensor:
    m.average = (0.9 * m.average + 0.1 * m.weight).detach()
    assert type(m.average) is Tensor
    return m.average


def average_of_clones(m: Hooked) -> Tensor:
    for clone, parameter in zip(m.anchor, m.parameters(), strict=True):
        clone.lerp_(parameter.data, 0.1)
    return torch.cat([clone.flatten() for clone in m.anchor])


def summed_squares(m: Hooked) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for parameter in m.parameters():
        total += parameter.detach().pow(2).sum()
    return total


def logged(m: Hooked) -> float:
    m.log("norm", m.weight.norm(), on_step=False, on_epoch=True)
    m.log("element", m.weight[3, 2].detach(), on_step=False, on_epoch=True)
    return 0.0


READS: dict[str, Callable[[Hooked], Any]] = {
    "average in place": average_in_place,
    "average anew": average_anew,
    "average of clones": average_of_clones,
    "norms": lambda m: sum(p.norm() for p in m.parameters()),
    "norms as numbers": lambda m: sum(p.norm().item() for p in m.parameters()),
    "stacked norms": lambda m: torch.stack([p.detach().norm(2) for p in m.parameters()]).norm(2),
    "norms of rows": lambda m: m.weight.norm(dim=1),
    "summed squares": summed_squares,
    "total norm": lambda m: nn.utils.get_total_norm(list(m.parameters())),
    "vector": lambda m: parameters_to_vector(m.parameters()),
    "distance": lambda m: sum((p - k).norm() for p, k in zip(m.parameters(), m.start, strict=True)),
    "element": lambda m: m.weight[3, 2].item(),
    "rows": lambda m: [float(row.norm()) for row in m.weight.detach()],
    "number": lambda m: float(m.net[2].bias),  # type: ignore[arg-type]
    "condition": lambda m: 1.0 if (m.weight > 0.3).any() else 0.0,
    "close": lambda m: float(torch.allclose(m.weight, m.start[0])),
    "mean and deviation": lambda m: m.weight.mean() + m.weight.std(),
    "largest": lambda m: m.weight.max() - m.weight.abs().min() + m.weight.argmax(),
    "median": lambda m: m.weight.median() + m.weight.detach().quantile(0.3),
    "histogram": lambda m: torch.histc(m.weight.detach(), 5),
    "array": lambda m: float(m.weight.detach().cpu().numpy().sum()),
    "list": lambda m: sum(m.weight.tolist()[3]),
    "singular values": lambda m: torch.linalg.svdvals(m.weight),
    "product": lambda m: m.weight.T @ m.weight,
    "layer": lambda m: nn.functional.linear(m.mask, m.weight, m.net[0].bias),  # type: ignore[arg-type]
    "share of small ones": lambda m: sum((p.abs() < 0.1).sum() for p in m.parameters()) / 21,
    "softmax": lambda m: m.weight.softmax(0) + m.weight.logsumexp(0),
    "tensor of elements": lambda m: torch.stack([m.weight.data[3, 0], m.weight[0, 0].detach()]),
    "copy of a row": lambda m: copy.deepcopy(m.weight.data[3]),
    "a row kept since the start": lambda m: m.row.sum(),
    "optimizer state": lambda m: sum(s["exp_avg"].norm() for s in m.trainer.optimizers[0].state.values()),
    "logged": logged,
}


def copied_back(m: Hooked) -> None:
    for start, parameter in zip(m.start, m.parameters(), strict=True):
        parameter.data.copy_(0.1 * start + 0.9 * parameter.data)


def clipped(m: Hooked) -> None:
    for parameter in m.parameters():
        parameter.data.clamp_(-0.5, 0.5)


def set_data(m: Hooked) -> None:
    for parameter in m.parameters():
        parameter.data = parameter.data * 0.9


def set_plain_data(m: Hooked) -> None:
    for start, parameter in zip(m.start, m.parameters(), strict=True):
        parameter.data = start * 0.9


def largest_norm(m: Hooked) -> None:
    with torch.no_grad():
        m.weight.mul_(m.weight.norm(dim=1, keepdim=True).clamp(max=1) / m.weight.norm(dim=1, keepdim=True))


def rows_set(m: Hooked) -> None:
    m.weight.data[0] = 0.5
    m.weight.data[3].mul_(0.9)
    m.weight.data[:, 1] = m.mask[:, 1]
    m.weight.data[2, 1] = 0.25


def small_ones_set(m: Hooked) -> None:
    m.weight.data[m.weight.data.abs() < 0.2] = 0.0


def views_written(m: Hooked) -> None:
    m.weight.data.view(-1)[5:8].mul_(0.5)
    m.weight.data.chunk(2)[1].add_(0.1)
    m.weight.data.t()[1].data[2:].fill_(0.4)
    m.weight[1].detach().fill_(0.3)
    m.weight.data.fill_diagonal_(0.7)
    m.row.add_(0.01)


def renormed(m: Hooked) -> None:
    m.weight.data.renorm_(2, 0, 0.9)


def masked(m: Hooked) -> None:
    m.weight.data.mul_(m.mask)


def reordered(m: Hooked) -> None:
    m.weight.data.copy_(m.weight.data.flip(0))
    m.weight.data[0].copy_(m.weight.data[1])


def orthogonal(m: Hooked) -> None:
    m.weight.data.copy_(torch.linalg.qr(m.weight.data)[0])


def drawn(m: Hooked) -> None:
    torch.manual_seed(3)
    nn.init.xavier_uniform_(m.weight)
    m.weight.data.add_(torch.randn_like(m.weight), alpha=0.1)


def saved_and_loaded(m: Hooked) -> None:
    best = copy.deepcopy(m.state_dict())
    m.weight.data.zero_()
    m.load_state_dict(best)


def whole_state_loaded(m: Hooked) -> None:
    m.load_state_dict(m.start_state)


def optimizer_state_replaced(m: Hooked) -> None:
    for parameter, state in m.trainer.optimizers[0].state.items():
        state["exp_avg"] = torch.full(parameter.shape, 0.01, dtype=parameter.dtype)


WRITES: dict[str, Callable[[Hooked], None]] = {
    "copied back": copied_back,
    "clipped": clipped,
    "data set": set_data,
    "vector": lambda m: vector_to_parameters(parameters_to_vector(m.parameters()) * 0.9, m.parameters()),
    "largest norm": largest_norm,
    "renormed": renormed,
    "rows set": rows_set,
    "small ones set": small_ones_set,
    "views written": views_written,
    "masked": masked,
    "reordered": reordered,
    "orthogonal": orthogonal,
    "drawn": drawn,
    "best state": saved_and_loaded,
    "optimizer state": optimizer_state_replaced,
    "whole data set": set_plain_data,
    "whole state": whole_state_loaded,
}


def gradients_changed(m: Hooked) -> Tensor:
    """On some steps each: the optimizer would hide scales of all gradients."""
    gradient: Any = m.weight.grad
    change = m.trainer.global_step % 4
    if change == 0:
        gradient.mul_(m.mask)
        m.net[2].bias.grad = None  # type: ignore[assignment]
    elif change == 1:
        m.weight.grad = torch.full((4, 3), 0.1, dtype=torch.float64)
    elif change == 2:
        gradient.sub_(gradient.mean(dim=0, keepdim=True))
        gradient[3] = 0
    (0.1 * (m.weight - m.start[0]).pow(2).sum()).backward()
    for start, parameter in zip(m.start, m.parameters(), strict=True):
        if parameter.grad is not None:
            parameter.grad += 0.1 * (parameter.data - start)
    clip_grad_value_(m.parameters(), 0.2)
    norm = clip_grad_norm_(m.parameters(), 0.3)
    return norm + sum(grad_norm(m, 2).values())


def swapped_in(m: Hooked) -> None:
    m.kept = [parameter.data for parameter in m.parameters()]
    for start, parameter in zip(m.start, m.parameters(), strict=True):
        parameter.data = start


def swapped_out(m: Hooked) -> None:
    for own, parameter in zip(m.kept, m.parameters(), strict=True):
        parameter.data = own
    m.weight.data[3].mul_(0.9)


def written_in_step(m: Hooked) -> Tensor:
    with torch.no_grad():
        m.weight.clamp_(-0.6, 0.6)
    m.weight.data[3] = 0.1
    return m.weight.detach().norm()


def written_through_optimizer(m: Hooked) -> None:
    """What the optimizer holds are shards in a step, too; the module goes on with what was written."""
    first, *others = m.trainer.optimizers[0].param_groups[0]["params"]
    for parameter in others:
        parameter.data.clamp_(-0.3, 0.3)
    first.data[3] = 0.1
    first.data[2].mul_(0.5)


def penalized(m: Hooked) -> float:
    m.extra = sum((p - a).pow(2).sum() for p, a in zip(m.net.parameters(), m.anchor, strict=True))  # type: ignore[assignment]
    return 0.0


MODULES: dict[str, Callable[[], Hooked]] = {
    "reads": lambda: Hooked(end=READS, validation_end=READS),
    "writes": lambda: Hooked(end=WRITES),
    "gradients": lambda: Hooked(backward={"gradients": gradients_changed}),
    "swapped for validation": lambda: Hooked(
        validation_start={"in": swapped_in, "norm": READS["norms"]}, validation_end={"out": swapped_out}
    ),
    "in steps": lambda: Hooked(step={"written": written_in_step}),
    "through the optimizer": lambda: Hooked(step={"written": written_through_optimizer}),
    "set in steps": lambda: Hooked(step={"plain": set_plain_data, "own": set_data}),
}
WHOLE_STEP: dict[str, Callable[[], Hooked]] = {
    "in steps": MODULES["in steps"],
    "through the optimizer": MODULES["through the optimizer"],
    "set in steps": MODULES["set in steps"],
    "penalized": lambda: Hooked(step={"penalty": penalized}),
}


def _trained(module: Hooked, num_ranks: int, **options: Any) -> dict[str, Any]:
    strategy = SingleDeviceStrategy() if num_ranks == 1 else FSDPStrategy(batch_size_is="global", **options)
    trainer = quiet_trainer(strategy, num_ranks, max_epochs=1, limit_train_batches=3, limit_val_batches=1)
    trainer.fit(module, DataLoader(Numbered(), 6), DataLoader(Numbered(11), 4))
    return module.found | {"weights": weights(module)} | trainer.callback_metrics


def _all_trained(num_ranks: int, ways: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    torch.set_default_dtype(torch.float64)
    return [
        (name, _trained(make(), num_ranks, **options))
        for options in ways
        for name, make in (WHOLE_STEP if "shard" in options else MODULES).items()
    ]


@pytest.mark.parametrize(
    ("num_ranks", "ways"),
    [(2, [{}, {"shard": []}]), (3, [{}]), pytest.param(4, [{"replicas": 2}], marks=pytest.mark.slow)],
)
def test_hooks_see_and_change_what_they_do_on_one_device(num_ranks: int, ways: list[dict[str, Any]]) -> None:
    (expected,) = run_ranks(_all_trained, 1, 1, ways)
    for found in run_ranks(_all_trained, num_ranks, num_ranks, ways):
        for (name, single), (_, values) in zip(expected, found, strict=True):
            assert values.keys() == single.keys()
            for key, value in single.items():
                torch.testing.assert_close(
                    values[key], value, rtol=0, atol=1e-10, msg=lambda text, place=f"{name}, {key}": f"{place}: {text}"
                )


def shared_data(m: Hooked) -> None:
    for start, parameter in zip(m.start, m.parameters(), strict=True):
        parameter.data = start


def smaller_data(m: Hooked) -> None:
    m.weight.data = m.weight.data[:2]


def replaced_parameter(m: Hooked) -> None:
    m.net[0].weight = nn.Parameter(m.start[0])


REFUSED: dict[str, tuple[Callable[[Hooked], Any], str]] = {
    "shared": (shared_data, "0: fsdp: a hook has set parameter.data to a tensor that is still used elsewhere."),
    "smaller": (smaller_data, r"0: fsdp: parameter.data has the shape \(4, 3\), but was set to a tensor of the shape"),
    "replaced": (replaced_parameter, "0: fsdp: net.0.weight was added, or replaced by another parameter, after the"),
    "assigned": (lambda m: m.load_state_dict(m.start_state, assign=True), r"0: fsdp: load_state_dict\(assign=True\)"),
    "elements": (lambda m: torch.tensor([m.weight[3, 0]]), r"0: fsdp: torch.tensor\(\[...\]\) was given elements of"),
    "saved": (lambda m: torch.save(m.state_dict(), io.BytesIO()), "0: fsdp: a parameter, a gradient or a state of"),
}


def _refusals(num_ranks: int) -> list[str]:
    told = []
    for function, _ in REFUSED.values():
        trainer = quiet_trainer(FSDPStrategy(batch_size_is="global"), num_ranks)
        with pytest.raises(ConfigError) as caught:
            trainer.fit(Hooked(start={"refused": function}), DataLoader(Numbered(), 6))
        told.append(f"{trainer.global_step}: {caught.value}")
    return told


def test_what_shards_cannot_do_is_refused_by_name() -> None:
    for told in run_ranks(_refusals, 2, 2):
        for message, (_, pattern) in zip(told, REFUSED.values(), strict=True):
            assert re.match(pattern, message), message


def set_through_optimizer(m: Hooked) -> None:
    first = m.trainer.optimizers[0].param_groups[0]["params"][0]
    first.data = m.start[0] * 0.9


def smaller_in_step(m: Hooked) -> None:
    m.weight.data = m.weight.data[:2]


REFUSED_IN_STEPS: dict[str, tuple[Callable[[Hooked], Any], str]] = {
    "a shard": (set_through_optimizer, "fsdp: a step has set the data of a parameter that was taken from the module"),
    "smaller": (smaller_in_step, r"fsdp: parameter.data has the shape \(4, 3\), but was set to a tensor of the shape"),
}


def _refused_in_steps(num_ranks: int) -> list[str]:
    told = []
    for function, _ in REFUSED_IN_STEPS.values():
        with pytest.raises(ConfigError) as caught:
            _trained(Hooked(step={"refused": function}), num_ranks, shard=[])
        told.append(str(caught.value))
    return told


def test_what_a_step_cannot_set_is_refused_by_name() -> None:
    for told in run_ranks(_refused_in_steps, 2, 2):
        for message, (_, pattern) in zip(told, REFUSED_IN_STEPS.values(), strict=True):
            assert re.match(pattern, message), message
