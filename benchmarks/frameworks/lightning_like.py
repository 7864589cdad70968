"""Evener's Trainer and stock Lightning's, with one module for both."""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from .problem import Batch, Run


class Module(pl.LightningModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.attempt, self.net = run, run.problem.net()
        self.automatic_optimization = not run.problem.manual
        self.made = run.problem.optimizer(self.parameters()) if run.problem.early else None

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.attempt.begin(batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.attempt.problem.loss(self.net, batch)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch["i"]))
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.attempt.validate(batch)
        values = self.attempt.problem.score(self.net, batch)  # type: ignore[misc]
        self.log("val", values.mean(), sync_dist=True, batch_size=len(values))

    def configure_optimizers(self) -> Any:
        optimizer = self.made or self.attempt.problem.optimizer(self.parameters())
        if (schedule := self.attempt.problem.schedule) is None:
            return optimizer
        return [optimizer], [{"scheduler": schedule(optimizer), "interval": "step"}]


def fit(run: Run, trainer_of: Any, newest: Any, **options: Any) -> None:
    p = run.problem
    pl.seed_everything(p.seed, workers=True, verbose=False)
    loaders = {
        "train_dataloaders": DataLoader(
            p.data(), p.rank_batch, shuffle=p.shuffle, num_workers=p.workers, pin_memory=p.device != "cpu"
        ),
        "val_dataloaders": DataLoader(p.validation(), p.rank_batch) if p.validation else None,
    }
    trainer = trainer_of(
        accelerator=p.device, max_epochs=p.epochs, max_steps=p.max_steps, accumulate_grad_batches=p.accumulate,
        gradient_clip_val=p.clip or None, logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, enable_checkpointing=p.save, default_root_dir=run.folder,
        val_check_interval=1 / p.validations if p.validations > 1 else None, **options,
    )  # fmt: skip
    module = Module(run)
    trainer.fit(module, **loaders, ckpt_path=newest)
    logged = {name: trainer.callback_metrics[name] for name in ("val", "loss") if name in trainer.callback_metrics}
    run.end(module.net, trainer.global_step, **logged)


def train_lightning(run: Run) -> None:
    p, found = run.problem, run.newest("*.ckpt")
    strategy: Any = "auto"
    if p.strategy == "fsdp":
        from pytorch_lightning.strategies import FSDPStrategy

        strategy = FSDPStrategy()
    elif p.ranks > 1:
        from pytorch_lightning.strategies import DDPStrategy

        strategy = DDPStrategy(**p.ddp)
    saving = ModelCheckpoint(run.folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    newest = str(found[0]) if found else None
    fit(run, pl.Trainer, newest, strategy=strategy, devices=p.ranks, callbacks=[saving] if p.save else [])


def train_evener(run: Run) -> None:
    from evener import strategies
    from evener.trainer import Trainer
    from evener.trainer.checkpoint import Checkpoint
    from evener.trainer.checkpoint.file_io import find_newest

    p, newest = run.problem, find_newest(run.folder)
    name = p.strategy or ("ddp" if p.ranks > 1 else "single_device")
    several = {"devices": ["cpu", "cpu"]} if name in ("dp", "balanced_dp", "model_parallel") else {}
    made = strategies.STRATEGIES[name](**p.ddp, **several)
    fit(
        run, Trainer, newest and str(newest), strategy=made, devices=p.ranks, exact_accumulation=p.accumulate > 1,
        callbacks=[Checkpoint(run.folder, every_n_steps=1)] if p.save else [],
    )  # fmt: skip
