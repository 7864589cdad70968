"""What modules ask of the trainer: lists, metrics, several loaders, schedules, manual optimization, callbacks."""

import copy

import torch
import torch.nn.functional as F
import torchmetrics
from pytorch_lightning import Callback, LightningDataModule
from pytorch_lightning.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    StochasticWeightAveraging,
)
from pytorch_lightning.utilities import CombinedLoader, grad_norm
from tiny import Thaw
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import evener

from .case import Lit, Net, Rows, Staged, both, case, ints, mlp, normal, regression, remedy, vectors


@case(vectors())
class MacroF1FromDicts(Net):
    """Lightning 2's migration pattern: a list of the steps' dicts, read at the epoch's end."""

    def build(self):
        self.validation_step_outputs = []

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.validation_step_outputs.append(
            {"loss": F.cross_entropy(logits, y), "preds": logits.argmax(-1), "target": y}
        )

    def on_validation_epoch_end(self):
        outputs = self.validation_step_outputs
        preds, target = torch.cat([o["preds"] for o in outputs]), torch.cat([o["target"] for o in outputs])
        f1 = torchmetrics.functional.f1_score(preds, target, task="multiclass", num_classes=3, average="macro")
        self.log("val_loss", torch.stack([o["loss"] for o in outputs]).mean(), prog_bar=True)
        self.log("val_f1", f1, prog_bar=True)
        outputs.clear()


@case(vectors(), "exception", differs=("train_epoch_mean",))
class TrainLosses(Net):
    """Training collects its losses, of which each part of a batch has its own, and logs their mean."""

    def build(self):
        self.training_step_outputs = []

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.training_step_outputs.append(loss)
        return loss

    def on_train_epoch_end(self):
        self.log("train_epoch_mean", torch.stack(self.training_step_outputs).mean())
        self.training_step_outputs.clear()


@case(vectors())
class Collections(Net):
    """Clones of a MetricCollection with prefixes."""

    def build(self):
        args = {"task": "multiclass", "num_classes": 3}
        members = {"acc": torchmetrics.Accuracy(**args), "auc": torchmetrics.AUROC(**args)}
        metrics = torchmetrics.MetricCollection(members)
        self.train_metrics, self.valid_metrics = metrics.clone(prefix="train_"), metrics.clone(prefix="val_")

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.train_metrics.update(logits, batch[1])
        self.log("train_loss", loss)
        return loss

    def on_train_epoch_end(self):
        self.log_dict(self.train_metrics.compute())
        self.train_metrics.reset()

    def validation_step(self, batch, batch_idx):
        self.valid_metrics(self(batch[0]), batch[1])
        self.log_dict(self.valid_metrics, on_step=False, on_epoch=True)


@case(vectors())
class BestMetric(Net, Staged):
    """lightning-hydra-template's metrics: MeanMetric for losses, MaxMetric for the best accuracy."""

    def build(self):
        self.train_acc, self.val_acc = (torchmetrics.Accuracy(task="multiclass", num_classes=3) for _ in range(2))
        self.train_loss, self.val_loss = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
        self.val_acc_best = torchmetrics.MaxMetric()

    def on_train_start(self):
        for metric in (self.val_loss, self.val_acc, self.val_acc_best):
            metric.reset()

    def shared_step(self, batch, stage):
        mean_loss, accuracy, logits = getattr(self, f"{stage}_loss"), getattr(self, f"{stage}_acc"), self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        mean_loss(loss)
        accuracy(logits.argmax(1), batch[1])
        self.log(f"{stage}/loss", mean_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log(f"{stage}/acc", accuracy, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def on_validation_epoch_end(self):
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)


def two_val_loaders():
    train, val = vectors()()
    return train, [val, DataLoader(Rows(normal(10, 6, seed=9), ints(3, 10, seed=9)), batch_size=4)]


@case(two_val_loaders)
class SeveralLoaders(Net):
    """Two validation loaders, with a list for each."""

    def on_validation_epoch_start(self):
        self.outs = {0: [], 1: []}

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        logits = self(batch[0])
        self.outs[dataloader_idx].append(logits.argmax(-1) == batch[1])
        self.log("val_loss", F.cross_entropy(logits, batch[1]))

    def on_validation_epoch_end(self):
        for index, outs in self.outs.items():
            self.log(f"val_acc_{index}", torch.cat(outs).double().mean())


def combined(mode, labelled=21, unlabelled=21, drop_last=False):
    def make():
        options = {"batch_size": 8, "shuffle": True, "drop_last": drop_last}
        first = DataLoader(Rows(normal(labelled, 6), ints(3, labelled)), **options)
        second = DataLoader(Rows(normal(unlabelled, 6, seed=4)), **options)
        return CombinedLoader({"labelled": first, "unlabelled": second}, mode), vectors()()[1]

    return make


class SemiSupervised(Net):
    """Labelled and unlabelled batches side by side; consistency with a moving average of the model."""

    def build(self):
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        (x, y), [u] = batch["labelled"], batch["unlabelled"]
        loss_x = F.cross_entropy(self(x), y)
        loss_u = F.mse_loss(self(u).softmax(-1), self.teacher(u).softmax(-1))
        loss = loss_x + 2.0 * loss_u
        self.log_dict({"train_loss": loss, "train_u": loss_u}, batch_size=len(x))
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for t, p in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                t.lerp_(p, 0.1)


@case(combined("min_size"))
class CombinedLoaders(SemiSupervised):
    pass


@case(combined("max_size_cycle", labelled=13, unlabelled=29), "remedy")
class CombinedUnequal(SemiSupervised):
    """Loaders of unequal lengths: the shorter one begins again, and its last batch is short beside a full one."""


@remedy(combined("max_size_cycle", labelled=13, unlabelled=29, drop_last=True))
class CombinedFull(CombinedUnequal):
    pass


class EMA(Callback):
    """An average of the weights that validation uses in their place."""

    def on_fit_start(self, trainer, pl_module):
        self.shadow = {k: v.detach().clone() for k, v in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for key, value in pl_module.named_parameters():
            self.shadow[key] = 0.9 * self.shadow[key] + 0.1 * value.detach()

    def on_validation_start(self, trainer, pl_module):
        self.stored = {k: v.detach().clone() for k, v in pl_module.named_parameters()}
        self.write(pl_module, self.shadow)

    def on_validation_end(self, trainer, pl_module):
        self.write(pl_module, self.stored)

    def write(self, pl_module, values):
        with torch.no_grad():
            for key, value in pl_module.named_parameters():
                value.copy_(values[key])


@case(vectors(), callbacks=lambda: [EMA()])
class AveragedWeights(Net):
    pass


@case(vectors(), callbacks=lambda: [StochasticWeightAveraging(0.05, swa_epoch_start=1)], max_epochs=3)
class SWA(Net):
    pass


@case(vectors(), callbacks=lambda: [LearningRateMonitor("step"), GradientAccumulationScheduler({0: 2, 1: 1})],
      gradient_clip_val=0.5)  # fmt: skip
class OneCycle(Net):
    """A schedule by step, clipping, accumulation in the first epoch."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=max(total, 5))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@case(vectors(), accumulate_grad_batches=2, gradient_clip_val=0.1, gradient_clip_algorithm="value")
class Accumulated(Net):
    pass


@case(both(lambda n, s: Rows(normal(n, 6, seed=s), ints(4, n, seed=s) - 1)), accumulate_grad_batches=3)
class AccumulatedIgnoring(Net):
    """Accumulation of means over the labelled samples of each batch."""

    def loss(self, out, y):
        return F.cross_entropy(out, y, ignore_index=-1)


@case(vectors(), callbacks=lambda: [EarlyStopping("val_loss", patience=1, min_delta=10.0)], max_epochs=5)
class Plateau(Net):
    """A plateau scheduler and early stopping, both by the validation loss."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


@case(vectors())
class ManualAccumulation(Net):
    """Gradients are accumulated, clipped and stepped by hand."""

    def build(self):
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        opt, scheduler = self.optimizers(), self.lr_schedulers()
        loss = self.step(batch) / 2
        self.manual_backward(loss)
        if (batch_idx + 1) % 2 == 0 or self.trainer.is_last_batch:
            self.clip_gradients(opt, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            opt.step()
            scheduler.step()
            opt.zero_grad()
        self.log("train_loss", loss * 2, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


@case(both(lambda n, s: Rows(normal(n, 6, seed=s), normal(n, 6, seed=s + 1))), "remedy")
class GatherInStep(Net):
    """Embeddings of all ranks with gradients; its labels suppose equal parts."""

    sizes = (6, 8, 4)

    def step(self, batch):
        a, b = (F.normalize(self.net(x), dim=-1) for x in batch)
        keys = self.all_gather(b, sync_grads=True).reshape(-1, b.shape[-1])
        labels = torch.arange(len(a), device=self.device) + self.global_rank * len(a)
        return F.cross_entropy(a @ keys.T / 0.2, labels)


@remedy()
class GatheredOverBatch(GatherInStep):
    def step(self, batch):
        return evener.over_batch(self.loss)(*(F.normalize(self.net(x), dim=-1) for x in batch))

    def loss(self, a, keys):
        return F.cross_entropy(a @ keys.T / 0.2, torch.arange(len(a), device=a.device))


@case(vectors(), stock=False)
class OverBatchPairs(Net):
    """The loss of all pairs is computed where the rows of parts meet."""

    def of_pairs(self, z, y):
        return F.binary_cross_entropy_with_logits(z @ z.T, (y[:, None] == y[None]).double())

    def training_step(self, batch, batch_idx):
        loss = evener.over_batch(self.of_pairs)(F.normalize(self.net(batch[0]), dim=-1), batch[1])
        self.log("train_loss", loss)
        return loss


@case(vectors())
class LoggingIdioms(Net):
    """Numbers, tensors, dicts, by step and by epoch, reductions, in hooks, with metrics of the gradient."""

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        acc = (logits.argmax(-1) == batch[1]).double().mean().item()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"train_acc": acc, "train_logit": logits.mean()}, on_step=False, on_epoch=True)
        self.log("train_max", logits.max(), on_step=False, on_epoch=True, reduce_fx="max")
        return {"loss": loss, "logits": logits.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("train_end", outputs["loss"], on_step=False, on_epoch=True)

    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self, norm_type=2))


@case(vectors(), callbacks=lambda: [Thaw(1e-3)])
class FinetuningCallback(Net):
    def configure_optimizers(self):
        return torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=1e-2)


@case(vectors())
class ThawByHand(Net):
    """requires_grad is switched in a hook, between epochs."""

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.current_epoch >= 1)


@case(vectors(), "remedy")
class LazyNormalizer(Net):
    """The first batch gives the mean and scale that inputs are normalised by."""

    def build(self):
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("scale", torch.ones(6))
        self.ready = False

    def on_train_batch_start(self, batch, batch_idx):
        if not self.ready:
            self.mean, self.scale, self.ready = batch[0].mean(0), batch[0].std(0), True

    def forward(self, x):
        return self.net((x - self.mean) / self.scale)


@remedy()
class GatheredNormalizer(LazyNormalizer):
    def on_train_batch_start(self, batch, batch_idx):
        x = self.all_gather(batch[0]).reshape(-1, 6)
        super().on_train_batch_start([x], batch_idx)


@case(vectors(), "remedy")
class LazyInStep(Net):
    """The same within the step, where a part would give its own."""

    def build(self):
        self.offset = None

    def training_step(self, batch, batch_idx):
        if self.offset is None:
            self.offset = batch[0].mean(0)
        loss = F.cross_entropy(self(batch[0] - self.offset), batch[1])
        self.log("train_loss", loss)
        return loss


@remedy(fsdp={"verify": False})
class LazyBeforeStep(LazyInStep):
    """Before the step; fsdp verifies earlier than any hook of training."""

    def on_train_batch_start(self, batch, batch_idx):
        if self.offset is None:
            self.offset = self.all_gather(batch[0]).reshape(-1, 6).mean(0)


@case(regression())
class InputGradientPenalty(Net):
    """A gradient penalty in automatic optimization: double backward."""

    sizes = (6, 8, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = x.clone().requires_grad_(True)
        out = self.net(x)
        [gradient] = torch.autograd.grad(out.sum(), x, create_graph=True)
        penalty = ((gradient.norm(2, dim=1) - 1) ** 2).mean()
        loss = self.loss(out, y) + 0.1 * penalty
        self.log_dict({"train_loss": loss, "train_penalty": penalty})
        return loss

    def loss(self, out, y):
        return F.mse_loss(out, y)


@case(vectors())
class Compiled(Net):
    """The network is compiled, the loss is not."""

    def build(self):
        self.net = torch.compile(self.net, backend="aot_eager")


@case(vectors())
class CheckpointedActivations(Lit):
    """Blocks are computed again in the backward pass."""

    def build(self):
        self.blocks, self.head = nn.ModuleList([mlp(6, 8, 6) for _ in range(3)]), nn.Linear(6, 3)

    def step(self, batch):
        x = batch[0]
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(self.head(x), batch[1])


@case(both(lambda n, s: Rows(normal(n, 6, seed=s), ints(3, n, seed=s), normal(n, seed=s + 1) > 0.8)))
class ConditionalTerm(Net):
    """A second term that is there only if the batch has a sample for it."""

    def step(self, batch):
        x, y, flagged = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        if flagged.any():
            loss = loss + 0.5 * F.mse_loss(logits[flagged].softmax(-1), F.one_hot(y[flagged], 3).to(x.dtype))
        return loss


@case(vectors(), "remedy", over_batch="loss")
class SkippedSpikes(Net):
    """The step reads its own loss: a spike is scaled down, by a running mean in an attribute."""

    def build(self):
        self.running = None

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        value = loss.item()
        self.running = value if self.running is None else 0.5 * self.running + 0.5 * value
        self.log("train_loss", loss)
        return loss * 0.1 if value > self.running else loss


@case(vectors(), "remedy", over_batch="loss")
class DetachedBalance(Net):
    """A term is brought to the size of another by detached values of the batch."""

    def loss(self, logits, y):
        ce, penalty = F.cross_entropy(logits, y), logits.pow(2).mean()
        return ce + 0.5 * penalty * (ce.detach() / (penalty.detach() + 1e-8))


@case(vectors())
class GradientHooks(Net):
    """Own clipping, a norm that is logged, and a look at every gradient."""

    def on_after_backward(self):
        norms = [p.grad.detach().norm() for p in self.parameters() if p.grad is not None]
        self.log("train_grad_norm", torch.stack(norms).norm())

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        nn.utils.clip_grad_norm_(self.parameters(), 0.2)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (self.trainer.global_step + 1) / 3)
        optimizer.step(closure=optimizer_closure)


class TableModule(LightningDataModule):
    """A data module with a hook that changes the batch after its transfer."""

    def setup(self, stage):
        data = Rows(normal(34, 6), ints(3, 34))
        self.train, self.val = torch.utils.data.random_split(data, [21, 13], torch.Generator().manual_seed(1))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=16)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), y


@case(TableModule)
class WithDataModule(Net):
    pass


@case(vectors())
class ClosureLBFGS(Net):
    """An optimizer that calls the step several times."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
