"""Manual optimization on replicas trains as on one device: GANs, closures, schedulers, clipping, frozen parts."""

import functools
import warnings
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from distributed import run_ranks
from parity import Case, make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import evener
from evener.strategies import (
    BalancedDataParallelStrategy,
    DataParallelStrategy,
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)

EXACT = 1e-10


class GAN(pl.LightningModule):
    """A generator and a discriminator; the noise comes with the batch, so that every strategy has the same."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def adversarial(self, logits: Tensor, real: bool) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.generator.parameters(), lr=0.02, betas=(0.5, 0.999)),
            torch.optim.Adam(self.discriminator.parameters(), lr=0.02, betas=(0.5, 0.999)),
        )


class WGANGP(GAN):
    """Gradient penalty, toggled optimizers, clipping, a scheduler, and a generator step every other batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, noise = batch
        of_generator, critic = self.optimizers()
        scheduler = self.lr_schedulers()
        self.toggle_optimizer(critic)
        with torch.no_grad():
            fake = self.generator(noise)
        mixed = (0.3 * images + 0.7 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.discriminator(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        critic_loss = self.discriminator(fake).mean() - self.discriminator(images).mean() + 10 * penalty
        critic.zero_grad()
        self.manual_backward(critic_loss)
        self.clip_gradients(critic, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        critic.step()
        self.untoggle_optimizer(critic)
        if batch_idx % 2:
            with of_generator.toggle_model():
                loss = -self.discriminator(self.generator(noise)).mean()
                assert not any(p.requires_grad for p in self.discriminator.parameters())
                of_generator.zero_grad()
                self.manual_backward(loss)
                of_generator.step()
        scheduler.step()
        return {"critic": critic_loss.detach(), "count": torch.ones(len(images))}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("critic", outputs["critic"])
        assert len(outputs["count"]) == len(batch[0])

    def configure_optimizers(self) -> Any:
        (generator, critic), gamma = super().configure_optimizers(), 0.9
        return [generator, critic], [torch.optim.lr_scheduler.ExponentialLR(critic, gamma)]


class Closures(GAN):
    """Both losses go backward in closures; the optimizers are those of Lightning 1's GAN example."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images, noise = batch
        of_generator, of_discriminator = self.optimizers()

        def generate() -> Tensor:
            of_generator.zero_grad()
            loss = self.adversarial(self.discriminator(self.generator(noise)), True)
            self.manual_backward(loss)
            return loss

        def discriminate() -> Tensor:
            of_discriminator.zero_grad()
            real = self.adversarial(self.discriminator(images), True)
            loss = real + self.adversarial(self.discriminator(self.generator(noise).detach()), False)
            self.manual_backward(loss)
            return loss

        self.log("g", of_generator.step(generate), on_epoch=True)
        self.log("d", of_discriminator.step(discriminate), on_epoch=True)


class Accumulated(GAN):
    """One optimizer that steps every second batch, plateaus, hooks of parameters, and a loss over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, float] = {}  # not a list: it would be taken for results of the steps
        self.generator[0].weight.register_hook(lambda g: self.seen.update({len(self.seen): float(g.sum())}))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        z = self.generator(batch[1])
        loss = F.mse_loss(z, batch[0]) + evener.over_batch(lambda z: z.std(0).sum())(z)
        self.manual_backward(loss / 2, retain_graph=False)
        if batch_idx % 2:
            torch.nn.utils.clip_grad_norm_(self.generator.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.generator.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)]


def _fit(kind: type[GAN], strategy: Any, devices: int = 1) -> tuple[Tensor, dict[str, float], int, GAN]:
    torch.manual_seed(3)
    module = kind().double()
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(28, 4, generator=generator, dtype=torch.float64)
    noise = torch.randn(28, 3, generator=generator, dtype=torch.float64)
    trainer = make_trainer(Case(), strategy, devices=devices)
    trainer.fit(module, DataLoader(TensorDataset(images, noise), batch_size=7))
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    return weights, {k: float(v) for k, v in trainer.callback_metrics.items()}, trainer.global_step, module


@functools.cache
def _on_one_device(kind: type[GAN]) -> tuple[Tensor, dict[str, float], int, GAN]:
    return _fit(kind, SingleDeviceStrategy())


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=EXACT)
    assert found[1] == pytest.approx(expected[1], abs=EXACT)
    assert found[2] == expected[2]


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        (WGANGP, DataParallelStrategy),
        (Accumulated, lambda: BalancedDataParallelStrategy(gpu0_chunk=0)),
        (WGANGP, lambda: ModelParallelStrategy(num_microbatches=2)),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_manual_optimization_in_one_process_has_whole_batches(
    kind: type[GAN], strategy: Any, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    expected = _on_one_device(kind)
    with caplog.at_level("INFO"):
        found = _fit(kind, strategy(), 2)
    told = caplog.text + "".join(str(one.message) for one in recwarn)
    assert "optimizes manually" in told
    assert "ts steps get whole batches" in told
    assert_same(found, expected)
    if isinstance(found[3], Accumulated) and isinstance(expected[3], Accumulated):
        sums = list(expected[3].seen.values())
        assert list(found[3].seen.values())[-len(sums) :] == pytest.approx(sums, abs=EXACT)  # looks at parts come first


def _fit_ranks(kinds: list[type[GAN]]) -> list[Any]:
    warnings.simplefilter("ignore")  # Lightning's advice; an error would end the rank
    make = partial(DDPStrategy, devices_per_process=2, batch_size_is="global", find_unused_parameters=True)
    return [_fit(kind, make(), 4)[:3] for kind in kinds]


@pytest.mark.long
def test_manual_optimization_on_replicas_of_ranks_trains_as_on_one_device() -> None:
    kinds = [WGANGP, Closures, Accumulated]
    for of_a_rank in run_ranks(_fit_ranks, 2, kinds):
        for kind, found in zip(kinds, of_a_rank, strict=True):
            torch.testing.assert_close(
                found[0], _on_one_device(kind)[0], rtol=0, atol=EXACT, msg=lambda m, k=kind: f"{k}: {m}"
            )
