"""Reading is a rank's own business: no property makes ranks communicate, so that rank 0 alone may read them all."""

import inspect
from typing import Any

from distributed import run_ranks
from pytorch_lightning.loggers import TensorBoardLogger
from regression import Net, Numbered, trainer_of
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

HOOKS = ("setup", "on_fit_start", "on_train_start", "on_train_batch_start", "on_train_batch_end", "on_validation_start",
         "on_validation_batch_end", "on_train_end")  # fmt: skip


def read_all(trainer: Any) -> int:
    """Read every property of the trainer, its strategy and its callbacks; return how many there were."""
    objects = [trainer, trainer.strategy, trainer.strategy.cluster_environment, *trainer.callbacks, *trainer.loggers]
    # it loads the data where that is not there yet, which is no reading: all ranks must do it together
    early = {"estimated_stepping_batches"} if trainer.train_dataloader is None else set()
    num = 0
    for owner in objects:
        for name, _ in inspect.getmembers(type(owner), lambda member: isinstance(member, property)):
            if name in early:
                continue
            try:
                getattr(owner, name)
                num += 1
            except (AttributeError, RuntimeError, AssertionError, TypeError):  # not there yet, at this point of a run
                continue
    return num


class Read(Net):
    """Rank 0 looks at everything, wherever it comes by."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.read = {"times": 0}  # a number would be added up over ranks
        self.own: list[float] = []

    def look(self, *_: Any, **__: Any) -> None:
        if self.trainer.is_global_zero:
            self.read["times"] += read_all(self.trainer)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.mean.update(batch[2])
        self.look()

    def on_validation_epoch_end(self) -> None:
        self.log("mean", self.mean)
        self.look()

    def on_train_epoch_end(self) -> None:
        self.log("late", float(self.global_rank), sync_dist=True)
        self.log("own", float(self.global_rank))
        self.look()
        if self.trainer.is_global_zero:
            self.own.append(self.trainer.callback_metrics["late"].item())


for name in HOOKS:
    setattr(Read, name, Read.look)


def _fit(folder: str) -> dict[str, Any]:
    module, loader = Read(), DataLoader(Numbered(), 4)
    logger = TensorBoardLogger(folder, name=None, default_hp_metric=False)
    options: dict[str, Any] = {"logger": logger, "enable_checkpointing": True, "log_every_n_steps": 1}
    trainer = trainer_of("ddp", num_sanity_val_steps=1, **options)
    trainer.fit(module, loader, loader)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {"metrics": metrics, "read": module.read["times"], "own": module.own, "log_dir": trainer.log_dir}


def test_rank_0_alone_may_read_everything_everywhere(tmp_path: Any) -> None:
    first, second = run_ranks(_fit, 2, str(tmp_path))
    assert first["read"] > 500
    assert second["read"] == 0
    assert first["metrics"] == second["metrics"]
    assert first["metrics"]["late"] == first["metrics"]["own"] == 0.5  # the mean of ranks 0 and 1
    assert first["metrics"]["mean"] == 10.0  # of 0..20
    assert first["own"] == [0.0, 0.0], "until the ranks have exchanged it, a value is the rank's own"
    assert first["log_dir"] == second["log_dir"] == str(tmp_path / "version_0")
