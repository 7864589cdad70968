"""Tables: regression, recommendation, survival, several tasks."""

import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn

from .case import Lit, Net, Rows, both, case, ints, mlp, normal, regression, uniform


@case(regression())
class Housing(Net):
    """A regression with several metrics of torchmetrics."""

    sizes = (6, 8, 1)

    def build(self):
        self.train_mse = torchmetrics.MeanSquaredError()
        self.val_mae, self.val_r2 = torchmetrics.MeanAbsoluteError(), torchmetrics.R2Score()

    def training_step(self, batch, batch_idx):
        preds, y = self(batch[0]).flatten(), batch[1].flatten()
        loss = F.mse_loss(preds, y)
        self.train_mse(preds, y)
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        self.log("train/mse", self.train_mse, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        preds, y = self(batch[0]).flatten(), batch[1].flatten()
        self.val_mae.update(preds, y)
        self.val_r2.update(preds, y)
        self.log("val/mae", self.val_mae)
        self.log("val/r2", self.val_r2)


def gaps(n, s):
    y = normal(n, 3, seed=s + 1)
    y[uniform(n, 3, seed=s + 2) < uniform(n, 1, seed=s + 3)] = float("nan")
    return Rows(normal(n, 6, seed=s), y)


@case(both(gaps))
class MissingTargets(Net):
    """Several properties, of which each sample has some."""

    def loss(self, preds, y):
        mask = ~torch.isnan(y)
        return F.mse_loss(preds[mask], y[mask])


@case(both(lambda n, s: Rows(normal(n, 6, seed=s), ints(3, n, seed=s), normal(n, 1, seed=s + 1))))
class UncertaintyWeighting(Lit):
    """Two tasks, weighted by learned variances."""

    def build(self):
        self.trunk, self.classify, self.regress = mlp(6, 8, 8), nn.Linear(8, 3), nn.Linear(8, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def step(self, batch):
        x, label, target = batch
        h = torch.tanh(self.trunk(x))
        losses = torch.stack([F.cross_entropy(self.classify(h), label), F.mse_loss(self.regress(h), target)])
        return (torch.exp(-self.log_vars) * losses + self.log_vars).sum()


class Factors(Lit):
    """Embeddings of users and items."""

    reg = 1e-2

    def build(self):
        self.users, self.items = nn.Embedding(9, 4), nn.Embedding(7, 4)


@case(both(lambda n, s: Rows(ints(9, n, seed=s), ints(7, n, seed=s + 1), 5 * uniform(n, seed=s + 2))))
class MatrixFactorization(Factors):
    """Ratings with biases, and a penalty on all weights."""

    def build(self):
        super().build()
        self.user_bias, self.item_bias = nn.Embedding(9, 1), nn.Embedding(7, 1)

    def step(self, batch):
        user, item, rating = batch
        score = (self.users(user) * self.items(item)).sum(-1)
        score = score + self.user_bias(user).squeeze(-1) + self.item_bias(item).squeeze(-1)
        penalty = self.users.weight.pow(2).sum() + self.items.weight.pow(2).sum()
        return F.mse_loss(score, rating) + self.reg * penalty


@case(both(lambda n, s: Rows(ints(9, n, seed=s), ints(7, n, seed=s + 1), ints(7, n, seed=s + 2))))
class BPR(Factors):
    """Bayesian personalised ranking; the batch's embeddings are regularised by their number."""

    def step(self, batch):
        user, positive, negative = batch
        u, i, j = self.users(user), self.items(positive), self.items(negative)
        loss = -F.logsigmoid((u * i).sum(1) - (u * j).sum(1)).mean()
        reg = (u.norm(2).pow(2) + i.norm(2).pow(2) + j.norm(2).pow(2)) / 2 / len(user)
        return loss + self.reg * reg


@case(both(lambda n, s: Rows(normal(n, 6, seed=s), uniform(n, seed=s + 1), ints(2, n, seed=s + 2))), "remedy", "loss")
class Cox(Net):
    """Cox' partial likelihood: everybody at risk in the batch."""

    sizes, optimizer = (6, 8, 1), torch.optim.SGD

    def step(self, batch):
        x, time, event = batch
        return self.loss(self.net(x).squeeze(-1), time, event)

    def loss(self, risk, time, event):
        order = torch.argsort(time, descending=True)
        risk, event = risk[order], event[order]
        return -((risk - torch.logcumsumexp(risk, 0)) * event).sum() / (event.sum() + 1e-8)


@case(both(lambda n, s: Rows(normal(n, 4, seed=s), ints(5, n, 3, seed=s + 1), ints(2, n, seed=s + 2).double())))
class WideAndDeep(Lit):
    """Embeddings of categories beside numbers; AUC over the epoch from lists of predictions and targets."""

    def build(self):
        self.embeddings = nn.ModuleList([nn.Embedding(5, 2) for _ in range(3)])
        self.deep, self.wide, self.criterion = mlp(10, 8, 1, act=nn.ReLU), nn.Linear(4, 1), nn.BCEWithLogitsLoss()
        self.preds, self.targets = [], []

    def forward(self, numbers, categories, y):
        embedded = [e(categories[:, i]) for i, e in enumerate(self.embeddings)]
        logits = (self.deep(torch.cat([numbers, *embedded], 1)) + self.wide(numbers)).squeeze(1)
        return self.criterion(logits, y), logits

    def training_step(self, batch, batch_idx):
        loss, _ = self(*batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, logits = self(*batch)
        self.preds.append(logits.sigmoid().detach().cpu())
        self.targets.append(batch[2].cpu())
        self.log("val_loss", loss, on_epoch=True)

    def on_validation_epoch_end(self):
        preds, targets = torch.cat(self.preds), torch.cat(self.targets)
        self.log("val_auc", torchmetrics.functional.auroc(preds, targets.long(), task="binary"), prog_bar=True)
        self.preds.clear()
        self.targets.clear()


@case(regression(), "remedy", over_batch="loss")
class RootMeanSquare(Net):
    """The root of the batch's mean squared error."""

    sizes = (6, 8, 1)

    def loss(self, preds, y):
        return torch.sqrt(F.mse_loss(preds, y) + 1e-6)


@case(both(lambda n, s: Rows(normal(n, 6, seed=s))), "remedy", over_batch="sparsity")
class SparseAutoencoder(Lit):
    """The mean activation of each unit over the batch is held near a target."""

    rho = 0.1

    def build(self):
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(8, 6)

    def step(self, batch):
        [x] = batch
        h = torch.sigmoid(self.encoder(x))
        return F.mse_loss(self.decoder(h), x) + 0.1 * self.sparsity(h)

    def sparsity(self, h):
        mean = h.mean(0)
        kl = self.rho * torch.log(self.rho / mean) + (1 - self.rho) * torch.log((1 - self.rho) / (1 - mean))
        return kl.sum()


@case(regression())
class ElasticNet(Lit):
    """A linear regression with L1 and L2 on its weights, trained by a sum over samples divided by their number."""

    def build(self):
        self.linear = nn.Linear(6, 1)

    def step(self, batch):
        x, y = batch
        loss = F.mse_loss(self.linear(x), y, reduction="sum")
        loss = loss + 0.1 * self.linear.weight.abs().sum() + 0.1 * self.linear.weight.pow(2).sum()
        return loss / x.size(0)


@case(regression())
class SumOfErrors(Net):
    """A sum over samples, by a constant: larger batches make larger steps."""

    sizes, optimizer, lr = (6, 8, 1), torch.optim.SGD, 0.1

    def loss(self, preds, y):
        return F.mse_loss(preds, y, reduction="sum") / 100
