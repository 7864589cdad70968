"""A run whose weights end as nan, or that has trained nothing, says so."""

from pathlib import Path

import pytest
import torch
from launching import configured
from torch import nan

from evener.strategies.core.module_checks import has_nan
from evener.trainer import Result, train
from evener.trainer.cli.train import run_job
from evener.trainer.job.result import summary_rows
from evener.trainer.study.sweep import Variant, best_of


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
