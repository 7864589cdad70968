"""Classifiers of vectors and images."""

import math

import torch
import torch.nn.functional as F
import torchmetrics
from pytorch_lightning import LightningModule
from torch import nn

from .case import Lit, Net, Rows, both, case, images, ints, mlp, normal, vectors


@case(images())
class LitDigits(LightningModule):
    """The tutorials' first module: accuracy as a torchmetrics object, logged by itself."""

    def __init__(self, hidden: int = 8, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 3))
        self.val_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)

    def forward(self, x):
        return F.log_softmax(self.model(x), dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.nll_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_accuracy.update(torch.argmax(logits, dim=1), y)
        self.log("val_loss", F.nll_loss(logits, y), prog_bar=True)
        self.log("val_acc", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


@case(vectors())
class ClassWeighted(Net):
    """Rare classes count more."""

    def build(self):
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]))


@case(vectors())
class LabelSmoothing(Net):
    """Label smoothing, SGD with a cosine schedule by step."""

    def build(self):
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@case(vectors(), "exception", settles=False)
class Mixup(Net):
    """Pairs of samples are mixed in the step, by a random permutation."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        lam = torch.distributions.Beta(0.4, 0.4).sample()
        index = torch.randperm(x.size(0), device=x.device)
        logits = self.net(lam * x + (1 - lam) * x[index])
        loss = lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, y[index])
        self.log("train_loss", loss)
        return loss


@case(vectors())
class Focal(Net):
    """Focal loss with a buffer of class weights."""

    gamma = 2.0

    def build(self):
        self.register_buffer("alpha", torch.tensor([0.5, 1.0, 2.0]))

    def loss(self, logits, target):
        ce = F.cross_entropy(logits, target, weight=self.alpha, reduction="none")
        return ((1 - torch.exp(-ce)) ** self.gamma * ce).mean()


@case(both(lambda n, s: Rows(normal(n, 6, seed=s), (normal(n, 4, seed=s + 3) > 1).double())))
class FocalByPositives(Net):
    """Sigmoid focal loss, normalised by the number of positives, as in dense detectors."""

    sizes = (6, 8, 4)

    def loss(self, logits, y):
        p = logits.sigmoid()
        ce = F.binary_cross_entropy_with_logits(logits, y, reduction="none")
        p_t = p * y + (1 - p) * (1 - y)
        loss = (0.25 * y + 0.75 * (1 - y)) * ce * (1 - p_t) ** 2
        return loss.sum() / y.sum().clamp(min=1.0)


@case(both(lambda n, s: Rows(normal(n, 6, seed=s), (normal(n, 4, seed=s + 3) > 0.5).double())))
class MultiLabel(Net):
    """BCE with pos_weight; F1 over the epoch."""

    sizes, optimizer = (6, 8, 4), torch.optim.AdamW

    def build(self, num_labels: int = 4):
        self.criterion = nn.BCEWithLogitsLoss(pos_weight=torch.full((num_labels,), 2.5))
        self.f1 = torchmetrics.F1Score(task="multilabel", num_labels=num_labels, average="macro")

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True, logger=True)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.f1(logits.sigmoid(), y.int())
        self.log_dict({"val/loss": self.criterion(logits, y), "val/f1": self.f1}, on_step=False, on_epoch=True)


@case(images(), "exception")
class ConvBatchNorm(Net):
    """A convolutional network with BatchNorm."""

    def build(self):
        block = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        self.net = nn.Sequential(*block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


@case(vectors(), "exception")
class DropoutMlp(Net):
    """Dropout between layers."""

    def build(self):
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


@case(vectors(), "remedy", over_batch="loss")
class HardExamples(Net):
    """Online hard example mining: the mean of the batch's largest losses."""

    keep = 0.5

    def loss(self, logits, y):
        losses = F.cross_entropy(logits, y, reduction="none")
        hardest, _ = torch.topk(losses, max(1, int(self.keep * losses.numel())))
        return hardest.mean()


@case(vectors())
class ArcFace(Lit):
    """Angular margin between an embedding and the weights of its class."""

    def build(self, s: float = 8.0, m: float = 0.3):
        self.s, self.m = s, m
        self.encoder = mlp(6, 8, 4)
        self.weight = nn.Parameter(torch.empty(3, 4))
        nn.init.xavier_uniform_(self.weight)

    def step(self, batch):
        x, y = batch
        cosine = F.linear(F.normalize(self.encoder(x)), F.normalize(self.weight))
        sine = torch.sqrt((1.0 - cosine**2).clamp(1e-9, 1))
        phi = cosine * math.cos(self.m) - sine * math.sin(self.m)
        one_hot = torch.zeros_like(cosine).scatter_(1, y.view(-1, 1), 1)
        return F.cross_entropy(self.s * (one_hot * phi + (1 - one_hot) * cosine), y)


@case(vectors())
class Distillation(Net):
    """A frozen teacher's softened answers, and the labels; the optimizer has the student alone."""

    def __init__(self, T: float = 3.0, alpha: float = 0.7) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.teacher = mlp(6, 16, 3).requires_grad_(False)

    def step(self, batch):
        x, y = batch
        T, alpha = self.hparams.T, self.hparams.alpha
        logits = self.net(x)
        with torch.no_grad():
            target = F.softmax(self.teacher(x) / T, dim=-1)
        kd = F.kl_div(F.log_softmax(logits / T, dim=-1), target, reduction="batchmean") * T * T
        return alpha * kd + (1 - alpha) * F.cross_entropy(logits, y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)


@case(both(lambda n, s: Rows(normal(n, 6, seed=s), ints(3, n, seed=s), 0.1 + normal(n, seed=s + 1).abs())))
class SampleWeights(Net):
    """Weights of samples that come with the data, normalised by their sum."""

    def step(self, batch):
        x, y, w = batch
        loss = F.cross_entropy(self.net(x), y, reduction="none")
        return (loss * w).sum() / w.sum()
