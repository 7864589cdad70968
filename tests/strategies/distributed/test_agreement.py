"""Gradients and weights that each rank has of its own are refused before the first step; the mean of all is trained."""

import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from distributed import run_ranks
from regression import Net, Numbered, quiet_trainer, refusal, trainer_of, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

from evener.strategies import FSDPStrategy


class Own(Net):
    """Computes, changes or uses gradients in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, in_backward = way, {"in backward": _update, "halved in backward": _halve}
        self.automatic_optimization = way in ("noise", *in_backward)
        for parameter in self.parameters() if way in in_backward else ():
            parameter.register_post_accumulate_grad_hook(in_backward[way])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        if self.way == "backward":
            loss.backward()
        elif self.way == "clipped":
            self.manual_backward(loss)
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        else:
            own = list(self.parameters())
            for parameter, gradient in zip(own, torch.autograd.grad(loss, own), strict=True):
                if self.way == "written":
                    parameter.data -= 0.1 * gradient
                else:  # the mean of ranks with equally many samples, or what is this rank's
                    average = self.way == "averaged"
                    parameter.grad = self.trainer.strategy.reduce(gradient) if average else gradient
        optimizer.step()
        return None

    def on_after_backward(self) -> None:
        generator = torch.Generator().manual_seed(self.global_rank)
        for parameter in self.parameters() if self.way == "noise" else ():
            assert parameter.grad is not None
            parameter.grad += torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 0.5


def _update(parameter: Tensor) -> None:
    assert parameter.grad is not None
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad
    parameter.grad = None


DDP = "the ranks have different values of net.0.weight"
WAYS: dict[str, dict[str, str]] = {
    "ddp": {
        **dict.fromkeys(("backward", "assigned", "written", "noise", "in backward"), f"ddp: {DDP}"),
        **dict.fromkeys(("clipped", "averaged", "halved in backward"), ""),
    },
    "whole": {
        "backward": "fsdp: training_step computed gradients of net.",
        "assigned": "fsdp: `grad = ` is called with a parameter",
        "written": f"fsdp: {DDP}",
        **dict.fromkeys(("clipped", "in backward"), ""),
    },
    "shards": {"backward": "fsdp: training_step computed gradients of net.2.bias"},
}
"""How a refusal begins, by strategy and way; none where the mean of all ranks is trained, as on one device."""


def _trained(name: str, way: str) -> str | Tensor:
    module = Own(way)
    whole = FSDPStrategy([], batch_size_is="global", timeout_s=60)
    trainer = quiet_trainer(whole, 2) if name == "whole" else trainer_of(name)
    return refusal(trainer, module, DataLoader(Numbered(16), 4)) or weights(module)


def _all_ways() -> dict[str, dict[str, Any]]:
    return {name: {way: _trained(name, way) for way in ways} for name, ways in WAYS.items()}


def test_a_ranks_own_gradients_are_refused_and_the_mean_of_all_is_trained() -> None:
    # Each rank trained with its own gradients, without a word, and rank 0's weights were saved.
    for rank in run_ranks(_all_ways, 2):
        for name, ways in WAYS.items():
            for way, told in ways.items():
                if told:
                    assert rank[name][way].startswith(told), way
                else:
                    torch.testing.assert_close(rank[name][way], _trained("single", way), rtol=0, atol=1e-10)


class OwnLayers(Net):
    """Changes its layers by the rank, in the last hook before the module is wrapped."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def configure_model(self) -> None:
        rank = self.trainer.global_rank
        if self.way == "shape":
            self.net[2] = nn.Linear(4, 1 + rank, dtype=torch.float64)
        elif rank:
            self.net[0].requires_grad_(False)


def _all_layers() -> list[str]:
    return [refusal(trainer_of("ddp"), OwnLayers(way), DataLoader(Numbered(16), 4)) for way in ("shape", "frozen")]


def test_ranks_that_train_other_parameters_are_refused() -> None:
    (shape, frozen), others = run_ranks(_all_layers, 2)
    assert others == [shape, frozen]
    first = "ddp: the ranks have different modules: where rank 0 trains"
    last = "net.2.weight (float64, shape (1, 4)), rank 1 trains"
    assert f"{first} {last} net.2.weight (float64, shape (2, 4)). " in shape
    assert f"{first} net.0.weight (float64, shape (4, 3)), rank 1 trains net.2.weight " in frozen


class Normalized(Net):
    """The first batch gives the scale of the inputs: of a rank's samples, or of all."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            x = batch[0] if self.way == "own" else self.all_gather(batch[0]).flatten(0, 1)
            self.scale = x.std(0)


def _warnings_of(way: str) -> list[str]:
    """What a fit warns of buffers."""
    trainer = trainer_of("ddp", max_steps=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Normalized(way), DataLoader(Numbered(16), 4))
    return [text for one in caught if "buffer" in (text := str(one.message))]


def test_a_buffer_that_each_rank_computes_of_its_samples_is_warned_of_once() -> None:
    (told,), others = run_ranks(_warnings_of, 2, "own")
    assert told.startswith("ddp: each rank has its own values of the buffer scale,")
    assert others == []
    assert run_ranks(_warnings_of, 2, "all") == [[], []]


class Changes(pl.Callback):
    """Changes the learning rate, or a weight at an epoch's end, by what this rank or what all ranks have."""

    def __init__(self, way: str) -> None:
        self.way = way

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.way != "weight":
            loss = outputs["loss"].detach().clone()
            loss = loss if self.way == "own" else trainer.strategy.reduce(loss)
            trainer.optimizers[0].param_groups[0]["lr"] = 0.05 / (1 + float(loss))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.way == "weight":
            pl_module.net[0].weight.data *= 1 + trainer.global_rank


def _changed(name: str, way: str) -> str | Tensor:
    module = Net()
    return refusal(trainer_of(name, callbacks=[Changes(way)]), module, DataLoader(Numbered(16), 4)) or weights(module)


def test_ranks_that_a_hook_trains_apart_are_refused_at_the_epochs_end() -> None:
    # Each rank went on with a learning rate of its own, in silence.
    for name, way, differing in (
        ("ddp", "own", "the learning rate of AdamW"),
        ("shards", "own", "the learning rate of AdamW"),
        ("ddp", "weight", "net.0.weight"),
    ):
        for told in run_ranks(_changed, 2, name, way):
            assert f": the ranks have different values of {differing}: each has changed it" in told
    for name in ("ddp", "shards"):
        for trained in run_ranks(_changed, 2, name, "all"):
            torch.testing.assert_close(trained, _changed("single", "all"), rtol=0, atol=1e-10)
