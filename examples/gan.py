"""Generate digits with a generator and a discriminator, each with its own optimizer (manual optimization)."""

from collections.abc import Callable

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from .digits import IMAGE_SIDE, Digits, labelled
from .pictures import NUM_SHOWN, draws_images, show_images


class DigitsGAN(pl.LightningModule):
    """A GAN of two multi-layer perceptrons.

    Validation logs `val/loss`, the energy score of the generator, because the two training losses do not measure image
    quality: the mean image scores 2.16 and other real digits score 1.51. It is a mean over real images, so it does not
    depend on the batch size.

    Under DDP each of the two backward passes leaves the other network without gradients: set
    `strategy.find_unused_parameters=true`.

    Source: "Generative adversarial nets" (Goodfellow et al. 2014), with the loss of its section 3 that does not
    saturate; energy score: "Strictly proper scoring rules" (Gneiting and Raftery 2007), equation 20.

    Args:
        lr: learning rate of both Adam optimizers.
        latent: size of the random vector that an image is generated from.
        hidden: units of each hidden layer.
        dropout: dropout probability of the discriminator, so that it does not win too early.
        num_val_images: number of generated images that each real one is compared with; their random vectors are the
            same in every epoch.
    """

    def __init__(
        self, lr: float = 2e-3, latent: int = 16, hidden: int = 128, dropout: float = 0.3, num_val_images: int = 256
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.lr = lr
        self.latent = latent
        num_pixels = IMAGE_SIDE**2
        self.generator = nn.Sequential(
            nn.Linear(latent, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, num_pixels),
            nn.Sigmoid(),
            nn.Unflatten(1, (1, IMAGE_SIDE, IMAGE_SIDE)),
        )
        self.discriminator = nn.Sequential(
            nn.Flatten(),
            nn.Linear(num_pixels, hidden),
            nn.LeakyReLU(0.2),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.LeakyReLU(0.2),
            nn.Dropout(dropout),
            nn.Linear(hidden, 1),
        )
        # Drawn from a separate generator: the same in every process, and the run's random state is not changed.
        noise = torch.randn(num_val_images, latent, generator=torch.Generator().manual_seed(0))
        self.register_buffer("val_noise", noise)

    def forward(self, noise: Tensor) -> Tensor:
        """Generate images.

        Args:
            noise: standard normal random numbers of shape (N, latent).

        Returns:
            Images of shape (N, 1, 8, 8), in 0..1.
        """
        return self.generator(noise)

    def training_step(self, batch: Digits, batch_idx: int) -> None:
        """Take one step of the generator and one of the discriminator; log both losses, in nats."""
        real, _ = labelled(batch)
        generator_optimizer, discriminator_optimizer = self.optimizers()
        noise = torch.randn(len(real), self.latent, device=self.device)
        generator_loss = self._step(generator_optimizer, lambda: self._generator_loss(noise))
        discriminator_loss = self._step(discriminator_optimizer, lambda: self._discriminator_loss(real, noise))
        losses = {"train/generator_loss": generator_loss, "train/discriminator_loss": discriminator_loss}
        self.log_dict(losses, batch_size=len(real), prog_bar=True)

    def validation_step(self, batch: Digits, batch_idx: int) -> None:
        """Log `val/loss`."""
        self._evaluate(batch, "val")

    def on_validation_epoch_end(self) -> None:
        """Show generated images in TensorBoard, of the same random vectors in every epoch."""
        if draws_images(self):
            show_images(self, "generated", self(self.val_noise[:NUM_SHOWN]))

    def test_step(self, batch: Digits, batch_idx: int) -> None:
        """Log `test/loss`."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Digits, batch_idx: int) -> Tensor:
        """Generate as many images as the batch has samples, shape (N, 1, 8, 8)."""
        return self(torch.randn(len(batch[0]), self.latent, device=self.device))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return one Adam for the generator and one for the discriminator, in this order."""
        networks = (self.generator, self.discriminator)
        return [torch.optim.Adam(network.parameters(), lr=self.lr, betas=(0.5, 0.999)) for network in networks]

    def _step(self, optimizer: LightningOptimizer, loss_of: Callable[[], Tensor]) -> Tensor:
        with self.toggled_optimizer(optimizer):
            loss = loss_of()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss.detach()

    def _generator_loss(self, noise: Tensor) -> Tensor:
        """Loss of the generator: high if the discriminator recognizes the generated images."""
        return F.softplus(-self.discriminator(self(noise))).mean()

    def _discriminator_loss(self, real: Tensor, noise: Tensor) -> Tensor:
        """Cross entropy of the discriminator, in nats, on equally many real and generated images."""
        with torch.no_grad():
            fake = self(noise)
        taken_real, taken_fake = self.discriminator(real), self.discriminator(fake)
        return (F.softplus(-taken_real).mean() + F.softplus(taken_fake).mean()) / 2

    def _evaluate(self, batch: Digits, split: str) -> None:
        real, _ = labelled(batch)
        score = energy_score(self(self.val_noise).flatten(1), real.flatten(1))
        self.log(f"{split}/loss", score, batch_size=len(real), prog_bar=True, sync_dist=True)


def energy_score(generated: Tensor, real: Tensor) -> Tensor:
    """Score a distribution by samples from it; lower is better, and the true distribution scores best in expectation.

    Args:
        generated: samples x of shape (M, D), M at least 2.
        real: data y of shape (N, D).

    Returns:
        The mean over y of E|x - y| - E|x - x'| / 2, where x and x' are different samples: a scalar.
    """
    num = len(generated)
    spread = torch.cdist(generated, generated).sum() / (num * (num - 1))
    return torch.cdist(real, generated).mean() - spread / 2
