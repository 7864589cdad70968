"""Self-supervised and metric learning: losses that compare samples with one another."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import evener

from .case import Lit, Net, Rows, both, case, mlp, normal, remedy, two_views, vectors


@case(two_views(), "remedy")
class SimCLR(Lit):
    """NT-Xent over both views of the batch."""

    def __init__(self, temperature: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = mlp(6, 8, 4)

    def info_nce_loss(self, feats):
        cos_sim = F.cosine_similarity(feats[:, None, :], feats[None, :, :], dim=-1)
        self_mask = torch.eye(cos_sim.shape[0], dtype=torch.bool, device=cos_sim.device)
        cos_sim = cos_sim.masked_fill(self_mask, -9e15)
        pos_mask = self_mask.roll(shifts=cos_sim.shape[0] // 2, dims=0)
        cos_sim = cos_sim / self.hparams.temperature
        nll = -cos_sim[pos_mask] + torch.logsumexp(cos_sim, dim=-1)
        return nll.mean()

    def step(self, batch):
        imgs, _ = batch
        return self.info_nce_loss(self.net(torch.cat(imgs, dim=0)))


@remedy()
class SimCLROverBatch(SimCLR):
    def step(self, batch):
        imgs, _ = batch
        return evener.over_batch(lambda *views: self.info_nce_loss(torch.cat(views)))(*map(self.net, imgs))


@case(both(lambda n, s: Rows(normal(n, 6, seed=s), normal(n, 5, seed=s + 1))), "remedy")
class CLIP(Lit):
    """Images and texts, both ways, with a learned temperature."""

    def build(self):
        self.visual, self.textual = mlp(6, 8, 4), mlp(5, 8, 4)
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))

    def step(self, batch):
        image, text = (F.normalize(net(x), dim=-1) for net, x in zip((self.visual, self.textual), batch, strict=True))
        return self.loss(image, text, self.logit_scale)

    def loss(self, image, text, logit_scale):
        logits = logit_scale.exp() * image @ text.t()
        labels = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


@remedy()
class CLIPOverBatch(CLIP):
    """Under fsdp its temperature needs a dimension, too."""

    def build(self):
        super().build()
        self.logit_scale = nn.Parameter(torch.tensor([2.6592]))

    def loss(self, *args):
        return evener.over_batch(super().loss)(*args)


@case(two_views(), "remedy", over_batch="loss")
class SupCon(Net):
    """Supervised contrastive loss."""

    sizes = (6, 8, 4)

    def step(self, batch):
        (a, b), labels = batch
        return self.loss(self.net(a), self.net(b), labels)

    def loss(self, a, b, labels):
        features = F.normalize(torch.cat([a, b]), dim=1)
        labels = labels.repeat(2).view(-1, 1)
        logits = features @ features.T / 0.1
        logits = logits - logits.max(dim=1, keepdim=True).values.detach()
        others = ~torch.eye(len(features), dtype=torch.bool, device=self.device)
        mask = (labels == labels.T) & others
        log_prob = logits - torch.log((logits.exp() * others).sum(1, keepdim=True))
        return -((mask * log_prob).sum(1) / mask.sum(1)).mean()


class Views(Net):
    """Compares the embeddings of two views."""

    sizes, optimizer = (6, 8, 4), torch.optim.SGD

    def step(self, batch):
        (a, b), _ = batch
        return self.loss(self.net(a), self.net(b))


@case(two_views(), "remedy", over_batch="loss")
class BarlowTwins(Views):
    """The cross-correlation of normalised embeddings over the batch."""

    lambd = 5e-3

    def loss(self, z1, z2):
        z1 = (z1 - z1.mean(0)) / z1.std(0)
        z2 = (z2 - z2.mean(0)) / z2.std(0)
        c = z1.T @ z2 / len(z1)
        on_diag = torch.diagonal(c).add(-1).pow(2).sum()
        off_diag = c.flatten()[:-1].view(3, 5)[:, 1:].pow(2).sum()
        return on_diag + self.lambd * off_diag


@case(two_views(), "remedy", over_batch="loss")
class VICReg(Views):
    """Invariance, variance and covariance of embeddings over the batch."""

    def loss(self, x, y):
        repr_loss = F.mse_loss(x, y)
        x, y = x - x.mean(0), y - y.mean(0)
        std_loss = sum(F.relu(1 - torch.sqrt(z.var(dim=0) + 1e-4)).mean() for z in (x, y)) / 2
        cov = [z.T @ z / (len(z) - 1) for z in (x, y)]
        cov_loss = sum((c - torch.diag(torch.diag(c))).pow(2).sum() / c.shape[0] for c in cov)
        return 25 * repr_loss + 25 * std_loss + cov_loss


@case(two_views())
class BYOL(Lit):
    """An online network predicts a target network's answers; the target follows as a moving average of weights."""

    tau = 0.9

    def build(self):
        self.online, self.predictor = mlp(6, 8, 4), mlp(4, 8, 4)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def similarity(self, a, b):
        with torch.no_grad():
            z = self.target(b)
        return 2 - 2 * F.cosine_similarity(self.predictor(self.online(a)), z, dim=-1).mean()

    def step(self, batch):
        (a, b), _ = batch
        return self.similarity(a, b) + self.similarity(b, a)

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for online, target in zip(self.online.parameters(), self.target.parameters(), strict=True):
            target.data = self.tau * target.data + (1 - self.tau) * online.data


@case(two_views(), "exception")
class SimSiam(Lit):
    """Stop-gradient between two views, BatchNorm in projector and predictor."""

    def build(self):
        self.projector = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.predictor = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))
        self.criterion = nn.CosineSimilarity(dim=1)

    def step(self, batch):
        (x1, x2), _ = batch
        z1, z2 = self.projector(x1), self.projector(x2)
        p1, p2 = self.predictor(z1), self.predictor(z2)
        return -(self.criterion(p1, z2.detach()).mean() + self.criterion(p2, z1.detach()).mean()) * 0.5


@case(two_views())
class MoCo(Lit):
    """A queue of keys, gathered from all ranks, and a momentum encoder, both updated in the step."""

    def build(self, size: int = 24, momentum: float = 0.9):
        self.size, self.momentum = size, momentum
        self.encoder_q, self.encoder_k = mlp(6, 8, 4), mlp(6, 8, 4)
        self.encoder_k.load_state_dict(self.encoder_q.state_dict())
        self.encoder_k.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(4, size), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def on_train_batch_start(self, batch, batch_idx):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data = k.data * self.momentum + q.data * (1.0 - self.momentum)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        keys = self.all_gather(keys).reshape(-1, keys.shape[-1])
        ptr, num = int(self.queue_ptr), len(keys)
        places = torch.arange(ptr, ptr + num, device=self.device) % self.size
        self.queue[:, places] = keys.T
        self.queue_ptr[0] = (ptr + num) % self.size

    def step(self, batch):
        (im_q, im_k), _ = batch
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            k = F.normalize(self.encoder_k(im_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([l_pos, l_neg], dim=1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=self.device))
        if self.training:
            self._dequeue_and_enqueue(k)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.encoder_q.parameters(), lr=0.1, momentum=0.9)


@case(vectors(), "remedy", over_batch="loss")
class HardTriplets(Net):
    """The hardest positive and negative of the batch for each anchor."""

    sizes, optimizer, margin = (6, 8, 4), torch.optim.SGD, 0.5

    def loss(self, z, y):
        distance = torch.cdist(z, z + 1e-3)
        same = y.unsqueeze(0) == y.unsqueeze(1)
        hardest_positive = (distance * same).max(dim=1).values
        hardest_negative = distance.masked_fill(same, 1e9).min(dim=1).values
        return F.relu(hardest_positive - hardest_negative + self.margin).mean()


@case(both(lambda n, s: Rows(normal(n, 6, seed=s), normal(n, 6, seed=s + 1), normal(n, 6, seed=s + 2))))
class GivenTriplets(Net):
    """Anchor, positive and negative from the dataset."""

    sizes, optimizer = (6, 8, 4), torch.optim.SGD

    def step(self, batch):
        return nn.TripletMarginLoss(margin=1.0)(*map(self.net, batch))


@case(two_views())
class DINO(Lit):
    """Self-distillation with a centre of the teacher's outputs over all ranks."""

    def build(self):
        self.student, self.teacher = mlp(6, 8, 5), mlp(6, 8, 5)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, 5))

    def step(self, batch):
        (a, b), _ = batch
        s1, s2 = self.student(a) / 0.1, self.student(b) / 0.1
        t1, t2 = self.teacher(a).detach(), self.teacher(b).detach()
        p1, p2 = F.softmax((t1 - self.center) / 0.04, -1), F.softmax((t2 - self.center) / 0.04, -1)
        loss = -((p2 * F.log_softmax(s1, -1)).sum(-1).mean() + (p1 * F.log_softmax(s2, -1)).sum(-1).mean()) / 2
        if self.training:
            self.update_center(torch.cat([t1, t2]))
        return loss

    @torch.no_grad()
    def update_center(self, teacher_output):
        gathered = self.all_gather(teacher_output).reshape(-1, teacher_output.shape[-1])
        self.center = self.center * 0.9 + gathered.mean(dim=0, keepdim=True) * 0.1

    def on_before_zero_grad(self, optimizer):
        with torch.no_grad():
            for s, t in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                t.mul_(0.9).add_(s.detach(), alpha=0.1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.student.parameters(), lr=1e-2)
