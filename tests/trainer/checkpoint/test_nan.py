"""A state that contains nan is never the best, and a run that ends with one says so."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launching import configured
from tiny import Scored, quiet
from torch import nan

from evener.strategies.core.module_checks import has_nan
from evener.trainer import Result, train
from evener.trainer.checkpoint import Checkpoint
from evener.trainer.cli.train import run_job
from evener.trainer.job.result import summary_rows
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


CASES: dict[str, tuple[Damaged, dict[str, Any], list[str]]] = {
    # Lightning takes a score that is nan for the worst number, which is the best of one
    "a score, max": (Damaged([nan, 0.5, nan]), {"monitor": "val", "mode": "max", "save_top_k": 2}, ["epoch1"]),
    "every score": (Damaged([nan, nan]), {"monitor": "val"}, []),
    # an accuracy stays a number: the arg max of nan is the first class
    "the weights": (Damaged([0.3, 0.9, 0.9], 1), {"monitor": "val", "mode": "max", "save_top_k": 3}, ["epoch0"]),
    "the weights, without a score": (Damaged([0.0, 0.0, 0.0], 2), {}, ["epoch1"]),
    "a score, and all are kept": (
        Damaged([nan, 0.5, nan]), {"monitor": "val", "save_top_k": -1}, ["epoch1", "epoch0", "epoch2"]
    ),
}  # fmt: skip
"""What is nan: the module, the policy, and the files that are kept, the best one first."""


@pytest.mark.parametrize("name", CASES)
def test_a_state_with_nan_is_never_the_best(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module, options, kept = CASES[name]
    checkpoint = fit(module, tmp_path, **options)
    assert Path(checkpoint.best_model_path).stem == (kept[0] if kept else "")
    assert {path.stem for path in tmp_path.glob("*.ckpt")} == {"last", *kept}
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == len(module.scores)
    if name == "every score":
        assert caplog.text.count("val is nan, so this state is not kept as one of the best") == 1


def test_nan_is_found_in_weights_of_any_kind() -> None:
    module = torch.nn.Module()
    module.large = torch.nn.Parameter(torch.full((99,), 60000.0, dtype=torch.float16))  # their sum is inf in float16
    module.counts = torch.nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    module.empty, module.lazy = torch.nn.Parameter(torch.empty(0)), torch.nn.LazyLinear(2)
    assert not has_nan(module)
    for dtype in (torch.float16, torch.complex64, torch.float8_e4m3fn):
        module.weight = torch.nn.Parameter(torch.tensor([1.0, nan]).to(dtype), requires_grad=False)
        assert has_nan(module)


def test_a_run_whose_weights_end_as_nan_has_diverged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # It ended with status 0, "fit finished" and a best checkpoint.
    with pytest.raises(SystemExit, match="Training diverged: the weights contain nan"):
        run_job(configured(tmp_path, "module._target_=launched.Diverges", "trainer.max_steps=4"))
    shown = capsys.readouterr().out
    assert "fit diverged: its weights contain nan" in shown
    (written,) = tmp_path.rglob("result.json")
    result = Result.read(written.parent)
    assert result.status == "diverged"
    assert result.best_checkpoint is None
    assert ("nan", "the weights, val/loss") in summary_rows(result)


def test_a_job_that_diverged_is_not_the_best_of_a_sweep() -> None:
    # min() of nan and a number is the first of both
    diverged, good = Variant(1, "dp", (), 0.1, "diverged"), Variant(2, "dp", (), 0.5, "")
    assert best_of([Variant(0, "dp", (), nan, ""), diverged, good], maximizes=False) == good


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`. If this was on purpose")  # Lightning's own
def test_a_run_without_any_step_fails_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Nothing was trained: training_step returned None for every batch"):
        train(configured(tmp_path, "module._target_=launched.Silent", "trainer.max_steps=4"))
