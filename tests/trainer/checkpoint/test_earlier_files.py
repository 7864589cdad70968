"""Files that an earlier version wrote are read: `files/` holds one of each layout, from before kinds and checksums."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import LambdaCallback
from tiny import Tiny, quiet
from torch.utils.data import DataLoader

from evener.trainer.checkpoint.file_io import is_good, read

FILES = Path(__file__).parent / "files"


@pytest.mark.parametrize("path", ["plain/last.ckpt", "memory/snapshot.ckpt", "shards/last.ckpt"])
def test_a_file_of_an_earlier_version_is_good_and_read(path: str) -> None:
    assert is_good(FILES / path)
    found = read(FILES / path)
    assert found["global_step"] == 7
    assert torch.equal(found["state_dict"]["wide"], torch.arange(300.0).reshape(3, 100))
    assert found["state_dict"]["few"].tolist() == [1, 1]
    assert found["hyper_parameters"] == {"cfg": {"lr": 0.1, "out": 0.1}, "where": "a/b"}


class Means(Tiny):
    """Logs an epoch's mean of its batches, and their largest value."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("mean", batch.mean(), on_step=True, on_epoch=True)
        self.log("largest", batch.max(), on_step=False, on_epoch=True, reduce_fx="max")
        return super().training_step(batch, batch_idx)


def _fit(path: Path, resume: Path | None = None) -> dict[str, float]:
    save = LambdaCallback(on_train_batch_end=lambda trainer, *args: args[-1] == 1 and trainer.save_checkpoint(path))
    trainer = quiet(callbacks=[save])
    trainer.fit(Means(), DataLoader(torch.tensor([[9.0], [1], [2], [3], [4]]), 2), ckpt_path=resume)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_logged_values_within_an_epoch_of_an_earlier_version_go_on(tmp_path: Path) -> None:
    whole = _fit(tmp_path / "whole.ckpt")
    assert whole == pytest.approx({"mean": 3.8, "mean_step": 4, "mean_epoch": 3.8, "largest": 9})
    checkpoint = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    del checkpoint["evener_file"]
    for rank in checkpoint["exact_resume"]["ranks"]:
        for entry in rank["results"].values():
            sums = entry.pop("sums")
            entry["state"] = {"value": sums["value"], "_forward_cache": entry.pop("last")}
            if entry["reduce_fx"] == "mean":
                entry["state"]["cumulated_batch_size"] = torch.tensor(sums["weight"])
            entry |= {"given": None, "num_updates": 2}
    torch.save(checkpoint, tmp_path / "earlier.ckpt")
    assert _fit(tmp_path / "next.ckpt", tmp_path / "earlier.ckpt") == pytest.approx(whole)
