"""A state that contains nan is never the best, and a run that ends with one says so."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from tiny import Scored, quiet
from torch import nan

from evener.strategies.core.module_checks import has_nan
from evener.trainer import Result, compose, train
from evener.trainer.checkpoint import Checkpoint
from evener.trainer.cli.train import run_job
from evener.trainer.job.summary import summary_rows
from evener.trainer.study.sweep import Variant, best_of


class Damaged(Scored):
    """From an epoch on its steps leave nan in the weights."""

    name = "val"

    def __init__(self, scores: list[float], damaged_from: int = 99) -> None:
        super().__init__(scores)
        self.damaged_from = damaged_from

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (nan if self.current_epoch >= self.damaged_from else 1.0)


def fit(module: Damaged, folder: Path, **options: Any) -> Checkpoint:
    """One step per epoch, for as many as there are scores."""
    checkpoint = Checkpoint(folder, filename="epoch{epoch}", **options)
    trainer = quiet(
        max_epochs=len(module.scores), callbacks=[checkpoint], num_sanity_val_steps=0, limit_train_batches=1
    )
    trainer.fit(module)
    return checkpoint


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_score_that_is_nan_is_never_the_best(tmp_path: Path, mode: Any) -> None:
    # Lightning takes it for the worst number, which is the best of one.
    checkpoint = fit(Damaged([nan, 0.5, nan]), tmp_path, monitor="val", mode=mode, save_top_k=2)
    assert Path(checkpoint.best_model_path).name == "epoch1.ckpt"
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["epoch1.ckpt", "last.ckpt"]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 3


def test_without_any_number_nothing_is_the_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = fit(Damaged([nan, nan]), tmp_path, monitor="val")
    assert checkpoint.best_model_path == ""
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["last.ckpt"]
    assert caplog.text.count("val is nan, so this state is not kept as one of the best") == 1


def test_weights_with_nan_are_never_the_best_whatever_their_score(tmp_path: Path) -> None:
    # An accuracy stays a number: the arg max of nan is the first class.
    checkpoint = fit(Damaged([0.3, 0.9, 0.9], damaged_from=1), tmp_path, monitor="val", mode="max", save_top_k=3)
    assert [Path(path).name for path in checkpoint.best_k_models] == ["epoch0.ckpt"]


def test_weights_with_nan_do_not_replace_the_newest(tmp_path: Path) -> None:
    checkpoint = fit(Damaged([0.0, 0.0, 0.0], damaged_from=2), tmp_path)
    assert Path(checkpoint.best_model_path).name == "epoch1.ckpt"


def test_a_policy_that_keeps_all_files_keeps_these_too(tmp_path: Path) -> None:
    checkpoint = fit(Damaged([nan, 0.5, nan]), tmp_path, monitor="val", save_top_k=-1)
    assert len(list(tmp_path.glob("epoch*.ckpt"))) == 3
    assert Path(checkpoint.best_model_path).name == "epoch1.ckpt"


def test_nan_is_found_in_weights_of_any_kind() -> None:
    module = torch.nn.Module()
    module.large = torch.nn.Parameter(torch.full((99,), 60000.0, dtype=torch.float16))  # their sum is inf in float16
    module.small = torch.nn.Parameter(-module.large.detach())
    module.counts = torch.nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    module.empty = torch.nn.Parameter(torch.empty(0))
    module.lazy = torch.nn.LazyLinear(2)
    module.complex = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    assert not has_nan(module)
    with torch.no_grad():
        module.small[7] = nan
    assert has_nan(module)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_nan_is_found_in_complex_weights_and_in_those_of_eight_bits(dtype: torch.dtype) -> None:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.tensor([1.0, nan]).to(dtype), requires_grad=False)
    assert has_nan(module)


def config(folder: Path, target: str) -> DictConfig:
    return compose(
        [
            "strategy=single_device", "devices=1", "accelerator=cpu", f"log_dir={folder}/logs", "data=none",
            f"module._target_=launched.{target}", f"+module.record={folder}/record", "trainer.max_steps=4",
            "logger=none", "callbacks=none", "trainer.enable_model_summary=false", "test_after_fit=false",
        ]
    )  # fmt: skip


def test_a_run_whose_weights_end_as_nan_has_diverged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # It ended with status 0, "fit finished" and a best checkpoint.
    with pytest.raises(SystemExit, match="Training diverged: the weights contain nan"):
        run_job(config(tmp_path, "Diverges"))
    shown = capsys.readouterr().out
    assert "fit diverged: its weights contain nan" in shown
    (written,) = tmp_path.rglob("result.json")
    result = Result.read(written.parent)
    assert result.status == "diverged"
    assert result.best_checkpoint is None
    assert ("nan", "the weights, val/loss") in summary_rows(result)


def test_a_finished_run_has_no_row_about_nan(tmp_path: Path) -> None:
    result = train(config(tmp_path, "Told"))
    assert result.status == "finished"
    assert "nan" not in [label for label, _ in summary_rows(result)]


def job(number: int, value: float, state: str = "") -> Variant:
    return Variant(number, "dp", (), value, state)


def test_a_job_that_diverged_is_not_the_best_of_a_sweep() -> None:
    # min() of nan and a number is the first of both
    assert best_of([job(0, nan), job(1, 0.1, "diverged"), job(2, 0.5), job(3, 0.7)], maximizes=False) == job(2, 0.5)
    assert best_of([job(0, nan)], maximizes=False) is None


class Silent(Damaged):
    """Returns None for the given batches."""

    def __init__(self, none_at: tuple[int, ...], automatic: bool = True) -> None:
        super().__init__([0.0, 0.0])
        self.none_at = none_at
        self.automatic_optimization = automatic

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if self.current_epoch in self.none_at else super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("none_at", "automatic", "told"), [((0, 1), True, 1), ((0,), True, 0), ((0, 1), False, 0)])
@pytest.mark.parametrize("lean", [True, False])
def test_a_training_step_that_always_returns_none_is_told(
    tmp_path: Path, none_at: tuple[int, ...], automatic: bool, told: int, lean: bool
) -> None:
    module = Silent(none_at, automatic)
    if not lean:  # Lightning's own optimization runs, as with several optimizers
        module.on_train_batch_start = lambda *_: setattr(module.trainer.fit_loop.epoch_loop._step, "is_lean", False)  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, tmp_path)
    texts = [str(warning.message) for warning in caught]
    assert sum("no optimizer step was taken" in text for text in texts) == told


def test_a_run_without_any_step_fails(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="training_step"),
        pytest.raises(ValueError, match="Nothing was trained: training_step returned None for every batch"),
    ):
        train(config(tmp_path, "Silent"))
