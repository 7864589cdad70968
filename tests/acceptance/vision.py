"""Segmentation, detection and other tasks on images."""

import torch
import torch.nn.functional as F
import torchmetrics
from pytorch_lightning import LightningModule
from torch import nn

from .case import Lit, Net, Rows, Staged, both, case, ints, remedy, uniform


class UNet(nn.Module):
    def __init__(self, channels: int = 1, classes: int = 3) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(channels, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True))
        self.bottom = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(inplace=True))
        self.up, self.head = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, classes, 1)

    def forward(self, x):
        skip = self.down(x)
        return self.head(torch.cat([self.up(self.bottom(skip)), skip], dim=1))


def street(n, s):
    masks = ints(3, n, 8, 8, seed=s + 1)
    masks[uniform(n, 8, 8, seed=s + 2) < uniform(n, 1, 1, seed=s + 3)] = 255  # more in some images than in others
    return Rows(uniform(n, 1, 8, 8, seed=s), masks)


@case(both(street))
class Segmentation(Lit):
    """Pixels that are not labelled are ignored; IoU by torchmetrics."""

    def build(self):
        self.net, self.criterion = UNet(), nn.CrossEntropyLoss(ignore_index=255)
        self.iou = torchmetrics.JaccardIndex(task="multiclass", num_classes=3, ignore_index=255)

    def training_step(self, batch, batch_idx):
        images, masks = batch
        loss = self.criterion(self.net(images), masks.long())
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, masks = batch
        logits = self.net(images)
        self.iou.update(logits.argmax(1), masks)
        self.log("val_loss", self.criterion(logits, masks))

    def on_validation_epoch_end(self):
        self.log("val_iou", self.iou.compute())
        self.iou.reset()


organs = both(lambda n, s: Rows(uniform(n, 1, 8, 8, seed=s), (uniform(n, 1, 8, 8, seed=s + 1) > 0.7).double()))


@case(organs, "remedy", over_batch="dice_loss")
class DiceOverBatch(Staged):
    """BCE and a dice over all pixels of the batch; pixel counts in lists for IoU over the epoch."""

    def build(self):
        self.model, self.bce, self.outputs = UNet(classes=1), nn.BCEWithLogitsLoss(), {"train": [], "val": []}

    def dice_loss(self, logits, target, smooth=1.0):
        probs, target = logits.sigmoid().view(-1), target.view(-1)
        intersection = (probs * target).sum()
        return 1 - (2.0 * intersection + smooth) / (probs.sum() + target.sum() + smooth)

    def shared_step(self, batch, stage):
        image, mask = batch
        logits = self.model(image)
        loss = self.bce(logits, mask) + self.dice_loss(logits, mask)
        hit = (logits.sigmoid() > 0.5) & (mask > 0.5)
        union = (logits.sigmoid() > 0.5) | (mask > 0.5)
        self.log(f"{stage}_loss", loss)
        return {"loss": loss, "tp": hit.sum((1, 2, 3)), "union": union.sum((1, 2, 3))}

    def validation_step(self, batch, batch_idx):
        self.outputs["val"].append(self.shared_step(batch, "val"))
        return self.outputs["val"][-1]

    def on_validation_epoch_end(self):
        tp, union = (torch.cat([x[key] for x in self.outputs["val"]]) for key in ("tp", "union"))
        self.log_dict({"val_image_iou": ((tp + 1) / (union + 1)).mean(), "val_dataset_iou": tp.sum() / union.sum()})
        self.outputs["val"].clear()


@case(organs)
class DicePerImage(Net):
    """A dice per image, and BCE."""

    def build(self):
        self.net = UNet(classes=1)

    def loss(self, logits, mask):
        probs, dims = logits.sigmoid(), (1, 2, 3)
        dice = (2 * (probs * mask).sum(dims) + 1) / (probs.sum(dims) + mask.sum(dims) + 1)
        return F.binary_cross_entropy_with_logits(logits, mask) + (1 - dice).mean()


def photos(n, s):
    """Images of unequal sizes, each with one to three boxes."""
    sizes, counts = ints(12, n, 2, seed=s, low=6).tolist(), ints(4, n, seed=s + 1, low=1).tolist()
    images = [uniform(1, h, w, seed=100 * s + i) for i, (h, w) in enumerate(sizes)]
    targets = [{"boxes": uniform(k, 4, seed=i), "labels": ints(3, k, seed=i)} for i, k in enumerate(counts)]
    return Rows(images, targets)


class Detector(nn.Module):
    """torchvision's interface: lists in; a dict of losses, or of detections."""

    size: tuple[int, int] | None = None
    """To which images are padded; None for that of the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        self.box, self.cls = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, images, targets=None):
        height, width = self.size or [max(i.shape[d] for i in images) for d in (-2, -1)]
        batch = images[0].new_zeros(len(images), 1, height, width)
        for padded, image in zip(batch, images, strict=True):
            padded[:, : image.shape[-2], : image.shape[-1]].copy_(image)
        features = self.backbone(batch).mean((2, 3))
        if targets is None or not self.training:
            found = zip(self.box(features), self.cls(features), strict=True)
            return [{"boxes": b, "scores": c.softmax(-1)} for b, c in found]
        rows = torch.cat([torch.full_like(t["labels"], i) for i, t in enumerate(targets)])
        features, labels = features[rows], torch.cat([t["labels"] for t in targets])
        boxes = torch.cat([t["boxes"] for t in targets])
        reg = F.smooth_l1_loss(self.box(features), boxes, reduction="sum") / labels.numel()
        return {"loss_classifier": F.cross_entropy(self.cls(features), labels), "loss_box_reg": reg}


@case(both(photos, collate_fn=lambda b: tuple(zip(*b, strict=True))), "remedy")
class Detection(LightningModule):
    """Two losses that are means over the boxes of the batch; scores of the epoch from a list.

    Images are padded to the largest of the part, and what is pooled over an image includes the padding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model, self.val_outputs = Detector(), []

    def training_step(self, batch, batch_idx):
        images, targets = batch
        loss_dict = self.model(images, targets)
        losses = sum(loss for loss in loss_dict.values())
        self.log_dict(loss_dict, batch_size=len(images))
        self.log("train_loss", losses, prog_bar=True, batch_size=len(images))
        return losses

    def validation_step(self, batch, batch_idx):
        images, targets = batch
        for output, target in zip(self.model(images), targets, strict=True):
            best = (output["boxes"] - target["boxes"]).abs().mean(1).min()
            self.val_outputs.append(best)

    def on_validation_epoch_end(self):
        self.log("val_distance", torch.stack(self.val_outputs).mean())
        self.val_outputs.clear()

    def configure_optimizers(self):
        params = [p for p in self.model.parameters() if p.requires_grad]
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=5e-4)


@remedy()
class DetectionOfOneSize(Detection):
    """Pads to a fixed size."""

    def __init__(self) -> None:
        super().__init__()
        self.model.size = (12, 12)


@case(both(lambda n, s: Rows(uniform(n, 1, 8, 8, seed=s), uniform(n, 3, 8, 8, seed=s + 1), ints(2, n, 3, seed=s + 2))))
class Keypoints(Net):
    """Heat maps; joints that are not visible don't count."""

    def build(self):
        self.net = UNet()

    def step(self, batch):
        image, heatmaps, visible = batch
        error = ((self.net(image) - heatmaps) ** 2).mean(dim=(2, 3))
        return (error * visible).sum() / visible.sum()


@case(both(lambda n, s: Rows(uniform(n, 1, 8, 8, seed=s), 3 * uniform(n, 1, 8, 8, seed=s + 1))))
class DepthMasked(Net):
    """L1 over the pixels that have a depth, and smoothness of the prediction."""

    def build(self):
        self.net = UNet(classes=1)

    def loss(self, pred, depth):
        valid = depth > 0.5
        smooth = (pred[..., 1:] - pred[..., :-1]).abs().mean() + (pred[..., 1:, :] - pred[..., :-1, :]).abs().mean()
        return F.l1_loss(pred[valid], depth[valid]) + 0.1 * smooth


@case(both(lambda n, s: Rows(uniform(n, 1, 8, 8, seed=s))), "exception")
class MaskedAutoencoder(Lit):
    """Patches are masked by sorted noise; the loss is a mean over the masked ones."""

    def build(self):
        self.encoder, self.decoder = nn.Linear(4, 8), nn.Linear(8, 4)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, 8))

    def step(self, batch):
        patches = F.unfold(batch[0], 2, stride=2).transpose(1, 2)
        order = torch.argsort(torch.rand(patches.shape[:2], device=self.device), dim=1).argsort(dim=1)
        mask = (order >= 4).to(patches.dtype).unsqueeze(-1)
        latent = self.encoder(patches) * (1 - mask) + self.mask_token * mask
        context = latent + latent.mean(1, keepdim=True)
        error = ((self.decoder(context) - patches) ** 2).mean(-1, keepdim=True)
        return (error * mask).sum() / mask.sum()
