"""GANs in manual optimization, autoencoders, diffusion and flows."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .case import ByHand, Lit, Rows, Staged, both, case, mlp, normal, remedy, uniform

pictures = both(lambda n, s: Rows(uniform(n, 1, 8, 8, seed=s) * 2 - 1))
points = both(lambda n, s: Rows(normal(n, 6, seed=s)))
pairs = both(lambda n, s: Rows(normal(n, 6, seed=s), normal(n, 6, seed=s + 1)))


class Adversarial(ByHand):
    """What GANs share: an optimizer for each of two networks."""

    def configure_optimizers(self):
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=1e-2, betas=(0.5, 0.999))
        return [opt_g, opt_d], []


@case(pictures, "exception")
class DCGAN(Adversarial):
    """Transposed convolutions with BatchNorm, noise drawn in the step, toggled optimizers."""

    def build(self, latent_dim: int = 4):
        self.latent_dim = latent_dim
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(latent_dim, 4, 4), nn.BatchNorm2d(4), nn.ReLU(True),
            nn.ConvTranspose2d(4, 1, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(nn.Conv2d(1, 4, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 1))

    def adversarial_loss(self, imgs, y):
        y_hat = self.discriminator(imgs)
        return F.binary_cross_entropy_with_logits(y_hat, torch.full_like(y_hat, y))

    def training_step(self, batch, batch_idx):
        [imgs] = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(imgs.shape[0], self.latent_dim, 1, 1, device=self.device)

        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self.generator(z), 1.0)
        self.log("train_g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        fake_loss = self.adversarial_loss(self.generator(z).detach(), 0.0)
        d_loss = (self.adversarial_loss(imgs, 1.0) + fake_loss) / 2
        self.log("train_d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def validation_step(self, batch, batch_idx):
        self.log("val_real", self.discriminator(batch[0]).mean())


@case(points, "exception")
class WGANGP(Adversarial):
    """Several critic steps, each with a gradient penalty at random points; one of the generator."""

    n_critic, lambda_gp = 2, 10.0

    def build(self):
        self.generator, self.discriminator = mlp(3, 8, 6), mlp(6, 8, 1)

    def gradient_penalty(self, real, fake):
        alpha = torch.rand(real.size(0), 1, device=self.device)
        mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        out = self.discriminator(mixed)
        ones = torch.ones_like(out)
        [grad] = torch.autograd.grad(out, mixed, grad_outputs=ones, create_graph=True, retain_graph=True)
        return ((grad.norm(2, dim=1) - 1) ** 2).mean()

    def training_step(self, batch, batch_idx):
        [real] = batch
        opt_g, opt_d = self.optimizers()
        for _ in range(self.n_critic):
            fake = self.generator(torch.randn(real.size(0), 3, device=self.device)).detach()
            d_loss = self.discriminator(fake).mean() - self.discriminator(real).mean()
            d_loss = d_loss + self.lambda_gp * self.gradient_penalty(real, fake)
            self.update(opt_d, d_loss)
        g_loss = -self.discriminator(self.generator(torch.randn(real.size(0), 3, device=self.device))).mean()
        self.update(opt_g, g_loss)
        self.log_dict({"train_d_loss": d_loss, "train_g_loss": g_loss}, prog_bar=True)

    def validation_step(self, batch, batch_idx):
        self.log("val_critic", self.discriminator(batch[0]).mean())


@case(pairs)
class Pix2Pix(Adversarial):
    """A conditional GAN without noise, and L1."""

    def build(self):
        self.generator, self.discriminator = mlp(6, 8, 6), mlp(12, 8, 1)

    def training_step(self, batch, batch_idx):
        source, target = batch
        opt_g, opt_d = self.optimizers()
        fake = self.generator(source)
        score = self.discriminator(torch.cat([source, fake], 1))
        g_loss = F.mse_loss(score, torch.ones_like(score)) + 10 * F.l1_loss(fake, target)
        self.update(opt_g, g_loss)
        real = self.discriminator(torch.cat([source, target], 1))
        made = self.discriminator(torch.cat([source, fake.detach()], 1))
        d_loss = 0.5 * (F.mse_loss(real, torch.ones_like(real)) + F.mse_loss(made, torch.zeros_like(made)))
        self.update(opt_d, d_loss)
        self.log_dict({"train_g_loss": g_loss, "train_d_loss": d_loss})

    def validation_step(self, batch, batch_idx):
        self.log("val_l1", F.l1_loss(self.generator(batch[0]), batch[1]))


@case(pictures, "exception")
class VAE(Staged):
    """The reparametrisation draws noise; both terms are sums over pixels and means over samples."""

    def build(self, latent: int = 3):
        self.encoder, self.decoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 2 * latent)), nn.Linear(latent, 64)

    def shared_step(self, batch, stage):
        [x] = batch
        mu, log_var = self.encoder(x).chunk(2, dim=-1)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * log_var)
        recon = F.mse_loss(self.decoder(z), x.flatten(1), reduction="none").sum(-1).mean()
        kl = (-0.5 * (1 + log_var - mu**2 - log_var.exp()).sum(-1)).mean()
        loss = recon + 0.1 * kl
        self.log_dict({f"{stage}_loss": loss.detach(), f"{stage}_recon": recon.detach(), f"{stage}_kl": kl.detach()})
        return loss


@case(pictures)
class AutoEncoder(Lit):
    """The README's autoencoder."""

    def build(self):
        self.encoder, self.decoder = mlp(64, 8, 3, act=nn.ReLU), mlp(3, 8, 64, act=nn.ReLU)

    def step(self, batch):
        x = batch[0].view(batch[0].size(0), -1)
        return F.mse_loss(self.decoder(self.encoder(x)), x)


@case(pictures, "exception")
class Diffusion(Lit):
    """Times and noise are drawn in the step."""

    def build(self, num_steps: int = 10):
        self.num_steps, self.net = num_steps, mlp(65, 16, 64)
        self.register_buffer("alpha_bar", torch.cumprod(1 - torch.linspace(1e-3, 0.2, num_steps), 0))

    def step(self, batch):
        x = batch[0].flatten(1)
        t = torch.randint(0, self.num_steps, (x.shape[0],), device=self.device)
        noise = torch.randn_like(x)
        a = self.alpha_bar[t].unsqueeze(1)
        noisy = a.sqrt() * x + (1 - a).sqrt() * noise
        return F.mse_loss(self.net(torch.cat([noisy, t.unsqueeze(1) / self.num_steps], 1)), noise)


class Coder(Lit):
    """Codes of points; what an encoder gives is replaced by the nearest code, straight through."""

    def build(self):
        self.encoder, self.decoder = mlp(6, 8, 3), mlp(3, 8, 6)


@case(points)
class VQVAE(Coder):
    """A codebook that learns by gradients."""

    def build(self):
        super().build()
        self.codebook = nn.Embedding(6, 3)

    def step(self, batch):
        z = self.encoder(batch[0])
        q = self.codebook(torch.cdist(z, self.codebook.weight).argmin(-1))
        vq_loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return F.mse_loss(self.decoder(z + (q - z).detach()), batch[0]) + vq_loss


@case(points, "remedy")
class VQVAEMovingAverage(Coder):
    """A codebook that follows the batch's codes as a moving average: buffers written in the step."""

    def build(self):
        super().build()
        self.register_buffer("embed", torch.randn(6, 3))
        self.register_buffer("cluster_size", torch.ones(6))
        self.register_buffer("embed_avg", self.embed.clone())

    def step(self, batch):
        z = self.encoder(batch[0])
        q = self.embed[torch.cdist(z, self.embed).argmin(-1)]
        if self.training:
            self.follow(z.detach())
        return F.mse_loss(self.decoder(z + (q - z).detach()), batch[0]) + 0.25 * F.mse_loss(z, q.detach())

    def follow(self, z):
        onehot = F.one_hot(torch.cdist(z, self.embed).argmin(-1), 6).to(z.dtype)
        self.cluster_size.mul_(0.9).add_(onehot.sum(0), alpha=0.1)
        self.embed_avg.mul_(0.9).add_(onehot.T @ z, alpha=0.1)
        self.embed.copy_(self.embed_avg / (self.cluster_size.unsqueeze(1) + 1e-5))


@remedy()
class VQVAEAfterBatch(VQVAEMovingAverage):
    """The codebook follows when the step is over, by the codes of all ranks."""

    def follow(self, z):
        pass

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        z = self.encoder(batch[0])
        super().follow(self.all_gather(z).reshape(-1, z.shape[-1]))


@case(points, "remedy", over_batch="generator_loss")
class VQGAN(Adversarial):
    """The adversarial term is weighted by a ratio of gradients of the last layer."""

    def build(self):
        self.generator = nn.ModuleDict({"body": mlp(6, 8, 4), "last": nn.Linear(4, 6)})
        self.discriminator = mlp(6, 8, 1)

    def hidden(self, x):
        return torch.tanh(self.generator["body"](x))

    def generator_loss(self, hidden, x):
        recon = self.generator["last"](hidden)
        nll_loss, g_loss = (x - recon).abs().mean(), -self.discriminator(recon).mean()
        return nll_loss + 0.8 * self.adaptive_weight(nll_loss, g_loss) * g_loss

    def adaptive_weight(self, nll_loss, g_loss):
        last = self.generator["last"].weight
        [nll_grads] = torch.autograd.grad(nll_loss, last, retain_graph=True)
        [g_grads] = torch.autograd.grad(g_loss, last, retain_graph=True)
        return (torch.norm(nll_grads) / (torch.norm(g_grads) + 1e-4)).clamp(0.0, 1e4).detach()

    def training_step(self, batch, batch_idx):
        [x] = batch
        opt_ae, opt_disc = self.optimizers()
        hidden = self.hidden(x)
        loss, recon = self.generator_loss(hidden, x), self.generator["last"](hidden)
        self.update(opt_ae, loss)
        d_loss = F.relu(1 - self.discriminator(x)).mean() + F.relu(1 + self.discriminator(recon.detach())).mean()
        self.update(opt_disc, 0.5 * d_loss)
        self.log_dict({"train_ae": loss, "train_disc": d_loss})

    def validation_step(self, batch, batch_idx):
        self.log("val_rec", (batch[0] - self.generator["last"](self.hidden(batch[0]))).abs().mean())


@case(points)
class RealNVP(Lit):
    """A normalising flow of affine couplings: bits per dimension."""

    def build(self):
        self.couplings = nn.ModuleList([mlp(3, 8, 6) for _ in range(3)])

    def step(self, batch):
        x, log_det = batch[0], 0.0
        for net in self.couplings:
            a, b = x.chunk(2, dim=1)
            s, t = net(a).chunk(2, dim=1)
            s = torch.tanh(s)
            x, log_det = torch.cat([b * s.exp() + t, a], dim=1), log_det + s.sum(1)
        log_prob = (-0.5 * x**2 - 0.5 * math.log(2 * math.pi)).sum(1) + log_det
        return -log_prob.mean() / (6 * math.log(2))
