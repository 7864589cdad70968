"""Tables: regression, recommendation, survival, several tasks."""

import torch
import torch.nn.functional as F
import torchmetrics
from pytorch_lightning import LightningModule
from torch import nn

import evener

from .case import Lit, Net, Rows, both, case, ints, mlp, normal, regression, remedy, uniform


@case(regression())
class Housing(Lit):
    """A regression with several metrics of torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 8, 1)
        self.train_mse, self.val_mae, self.val_r2 = (
            torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError(), torchmetrics.R2Score(),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        x, y = batch
        preds = self.net(x).flatten()
        loss = F.mse_loss(preds, y.flatten())
        self.train_mse(preds, y.flatten())
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        self.log("train/mse", self.train_mse, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        preds = self.net(x).flatten()
        self.val_mae.update(preds, y.flatten())
        self.val_r2.update(preds, y.flatten())
        self.log("val/mae", self.val_mae)
        self.log("val/r2", self.val_r2)


def gaps(n, s):
    y = normal(n, 3, seed=s + 1)
    y[uniform(n, 3, seed=s + 2) < uniform(n, 1, seed=s + 3)] = float("nan")
    return Rows(normal(n, 6, seed=s), y)


@case(both(gaps))
class MissingTargets(Net):
    """Several properties, of which each sample has some."""

    def step(self, batch):
        x, y = batch
        mask = ~torch.isnan(y)
        return F.mse_loss(self.net(x)[mask], y[mask])


two_tasks = both(lambda n, s: Rows(normal(n, 6, seed=s), ints(3, n, seed=s), normal(n, 1, seed=s + 1)))


@case(two_tasks)
class UncertaintyWeighting(Lit):
    """Two tasks, weighted by learned variances."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.classify, self.regress = mlp(6, 8, 8), nn.Linear(8, 3), nn.Linear(8, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def step(self, batch):
        x, label, target = batch
        h = torch.tanh(self.trunk(x))
        losses = torch.stack([F.cross_entropy(self.classify(h), label), F.mse_loss(self.regress(h), target)])
        return (torch.exp(-self.log_vars) * losses + self.log_vars).sum()


ratings = both(lambda n, s: Rows(ints(9, n, seed=s), ints(7, n, seed=s + 1), 5 * uniform(n, seed=s + 2)))


@case(ratings)
class MatrixFactorization(Lit):
    """Ratings with biases, and a penalty on all weights."""

    def __init__(self, reg: float = 1e-2) -> None:
        super().__init__()
        self.reg = reg
        self.users, self.items = nn.Embedding(9, 4), nn.Embedding(7, 4)
        self.user_bias, self.item_bias = nn.Embedding(9, 1), nn.Embedding(7, 1)

    def step(self, batch):
        user, item, rating = batch
        score = (self.users(user) * self.items(item)).sum(-1)
        score = score + self.user_bias(user).squeeze(-1) + self.item_bias(item).squeeze(-1)
        penalty = self.users.weight.pow(2).sum() + self.items.weight.pow(2).sum()
        return F.mse_loss(score, rating) + self.reg * penalty


@case(both(lambda n, s: Rows(ints(9, n, seed=s), ints(7, n, seed=s + 1), ints(7, n, seed=s + 2))))
class BPR(Lit):
    """Bayesian personalised ranking; the batch's embeddings are regularised by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(9, 4), nn.Embedding(7, 4)

    def step(self, batch):
        user, positive, negative = batch
        u, i, j = self.users(user), self.items(positive), self.items(negative)
        loss = -F.logsigmoid((u * i).sum(1) - (u * j).sum(1)).mean()
        reg = (u.norm(2).pow(2) + i.norm(2).pow(2) + j.norm(2).pow(2)) / 2 / len(user)
        return loss + 1e-2 * reg


@case(both(lambda n, s: Rows(normal(n, 6, seed=s), uniform(n, seed=s + 1), ints(2, n, seed=s + 2))), "remedy")
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


@remedy()
class CoxOverBatch(Cox):
    def loss(self, risk, time, event):
        return evener.over_batch(super().loss)(risk, time, event)


@case(both(lambda n, s: Rows(normal(n, 4, seed=s), ints(5, n, 3, seed=s + 1), ints(2, n, seed=s + 2).double())))
class WideAndDeep(LightningModule):
    """Embeddings of categories beside numbers; AUC over the epoch from lists of predictions and targets."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(5, 2) for _ in range(3)])
        self.deep, self.wide, self.criterion = mlp(10, 8, 1, act=nn.ReLU), nn.Linear(4, 1), nn.BCEWithLogitsLoss()
        self.preds, self.targets = [], []

    def forward(self, numbers, categories):
        embedded = [e(categories[:, i]) for i, e in enumerate(self.embeddings)]
        return (self.deep(torch.cat([numbers, *embedded], 1)) + self.wide(numbers)).squeeze(1)

    def training_step(self, batch, batch_idx):
        numbers, categories, y = batch
        loss = self.criterion(self(numbers, categories), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        numbers, categories, y = batch
        logits = self(numbers, categories)
        self.preds.append(logits.sigmoid().detach().cpu())
        self.targets.append(y.cpu())
        self.log("val_loss", self.criterion(logits, y), on_epoch=True)

    def on_validation_epoch_end(self):
        preds, targets = torch.cat(self.preds), torch.cat(self.targets)
        self.log("val_auc", torchmetrics.functional.auroc(preds, targets.long(), task="binary"), prog_bar=True)
        self.preds.clear()
        self.targets.clear()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2, weight_decay=1e-5)


@case(regression(), "remedy")
class RootMeanSquare(Net):
    """The root of the batch's mean squared error."""

    sizes = (6, 8, 1)

    def step(self, batch):
        return self.loss(self.net(batch[0]), batch[1])

    def loss(self, preds, y):
        return torch.sqrt(F.mse_loss(preds, y) + 1e-6)


@remedy()
class RootMeanSquareOverBatch(RootMeanSquare):
    def loss(self, preds, y):
        return evener.over_batch(super().loss)(preds, y)


@case(both(lambda n, s: Rows(normal(n, 6, seed=s))), "remedy")
class SparseAutoencoder(Lit):
    """The mean activation of each unit over the batch is held near a target."""

    def __init__(self, rho: float = 0.1) -> None:
        super().__init__()
        self.rho, self.encoder, self.decoder = rho, nn.Linear(6, 8), nn.Linear(8, 6)

    def step(self, batch):
        [x] = batch
        h = torch.sigmoid(self.encoder(x))
        return F.mse_loss(self.decoder(h), x) + 0.1 * self.sparsity(h)

    def sparsity(self, h):
        mean = h.mean(0)
        kl = self.rho * torch.log(self.rho / mean) + (1 - self.rho) * torch.log((1 - self.rho) / (1 - mean))
        return kl.sum()


@remedy()
class SparseAutoencoderOverBatch(SparseAutoencoder):
    def sparsity(self, h):
        return evener.over_batch(super().sparsity)(h)


@case(regression())
class ElasticNet(Lit):
    """A linear regression with L1 and L2 on its weights, trained by a sum over samples divided by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)

    def step(self, batch):
        x, y = batch
        loss = F.mse_loss(self.linear(x), y, reduction="sum")
        loss = loss + 0.1 * self.linear.weight.abs().sum() + 0.1 * self.linear.weight.pow(2).sum()
        return loss / x.size(0)


@case(regression())
class SumOfErrors(Lit):
    """A sum over samples, by a constant: larger batches make larger steps."""

    lr = 1e-3

    def __init__(self) -> None:
        super().__init__()
        self.net, self.criterion = mlp(6, 8, 1), nn.MSELoss(reduction="sum")

    def step(self, batch):
        return self.criterion(self.net(batch[0]), batch[1]) / 100

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
