"""What is saved after training has ended goes on as if it had not: also if steps or time ran out within an epoch."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from distributed import run_ranks, run_script
from pytorch_lightning.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from tiny import Tiny, quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric, SumMetric

from evener.strategies import DDPStrategy
from evener.trainer import Trainer
from evener.trainer.checkpoint import Checkpoint

NUM_STEPS = 12  # of two epochs of five batches, and two


class Counted(pl.LightningModule):
    """Draws random numbers, schedules, and collects metrics that the end of an epoch resets."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
        self.samples = SumMetric()
        self.seen: list[tuple[int, int, list[int]]] = []
        self.epochs: dict[int, tuple[float, float]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, ids = batch
        self.seen.append((self.current_epoch, batch_idx, ids.tolist()))
        self.samples.update(ids)
        loss = (self.net(x) - ids[:, None] / 10).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("sum", self.samples.compute())
        self.samples.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


def fit(steps: int, resume: Path | None = None, **options: Any) -> tuple[Counted, Trainer]:
    pl.seed_everything(3, verbose=False)
    module = Counted()
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    trainer = quiet(max_steps=steps, **options)
    trainer.fit(module, DataLoader(TensorDataset(x, torch.arange(20)), 4, shuffle=True), ckpt_path=resume)
    return module, trainer


def verify_same(found: list[tuple[Counted, Trainer]], whole: tuple[Counted, Trainer]) -> None:
    """Compare a run in parts with one that was left alone."""
    assert [place for module, _ in found for place in module.seen] == whole[0].seen
    (module, trainer), (expected, uninterrupted) = found[-1], whole
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=0, atol=1e-10)
    for name, value in uninterrupted.callback_metrics.items():
        assert float(trainer.callback_metrics[name]) == pytest.approx(float(value), rel=1e-6), name
    assert (trainer.global_step, trainer.current_epoch) == (NUM_STEPS, uninterrupted.current_epoch)


@pytest.mark.parametrize("steps", [2, 4, 5, 7, 10])
def test_save_checkpoint_after_max_steps_goes_on_exactly(steps: int, tmp_path: Path) -> None:
    first = fit(steps)
    torch.rand(5)  # what a script draws between training and saving is no part of training
    first[1].save_checkpoint(file := tmp_path / "own.ckpt")
    verify_same([first, fit(NUM_STEPS, file)], fit(NUM_STEPS))


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("saver", [Checkpoint, ModelCheckpoint])
def test_a_callback_that_saves_at_the_end_of_the_epoch_saves_the_point_within_it(saver: Any, tmp_path: Path) -> None:
    def callbacks(name: str) -> list[Any]:
        return [saver(tmp_path / name, every_n_epochs=1, save_last=True)]

    parts = [fit(2, callbacks=callbacks("parts"))]
    parts.append(fit(7, tmp_path / "parts/last.ckpt", callbacks=callbacks("parts")))
    parts.append(fit(NUM_STEPS, tmp_path / "parts/last.ckpt", callbacks=callbacks("parts")))
    verify_same(parts, fit(NUM_STEPS, callbacks=callbacks("whole")))


def test_time_that_is_used_up_within_an_epoch_leaves_its_rest_to_the_next_run(tmp_path: Path) -> None:
    first = fit(NUM_STEPS, max_time={"microseconds": 1}, callbacks=[Checkpoint(tmp_path / "parts")])
    assert 0 < len(first[0].seen) < 5
    second = fit(
        NUM_STEPS, tmp_path / "parts/last.ckpt", max_time={"hours": 1}, callbacks=[Checkpoint(tmp_path / "parts")]
    )
    verify_same([first, second], fit(NUM_STEPS, callbacks=[Checkpoint(tmp_path / "whole")]))


def test_max_time_is_that_of_the_run_also_if_it_goes_on_from_another(tmp_path: Path) -> None:
    parts = []
    while not parts or parts[-1][1].global_step < NUM_STEPS:
        last = tmp_path / "last.ckpt" if parts else None
        parts.append(fit(NUM_STEPS, last, max_time={"microseconds": 1}, callbacks=[Checkpoint(tmp_path)]))
        assert parts[-1][0].seen, "no step in this run"
    verify_same(parts, fit(NUM_STEPS))


def test_what_is_saved_after_an_evaluation_of_other_weights_is_as_lightning_saves_it(tmp_path: Path) -> None:
    _, trainer = fit(2)
    trainer.save_checkpoint(file := tmp_path / "own.ckpt")
    assert "exact_resume" in torch.load(file, weights_only=True)
    module = Counted()
    module.test_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    trainer.test(module, DataLoader(torch.zeros(1)), ckpt_path=file, verbose=False)
    trainer.save_checkpoint(file)
    assert "exact_resume" not in torch.load(file, weights_only=True)


def save_on_ranks(file: Path) -> Any:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # of Lightning, under a newer torch
    module, trainer = fit(7, strategy=DDPStrategy(batch_size_is="global", timeout_s=60), devices=2)
    trainer.save_checkpoint(file)
    return [place[:2] for place in module.seen]


@pytest.mark.long
def test_ranks_save_after_max_steps_what_one_device_goes_on_from(tmp_path: Path) -> None:
    places = run_ranks(save_on_ranks, 2, file := tmp_path / "own.ckpt")[0]
    saved = torch.load(file, weights_only=True)
    assert saved["loops"]["fit_loop"]["epoch_progress"]["current"]["completed"] == 1
    module, trainer = fit(NUM_STEPS, file)
    assert [*places, *(place[:2] for place in module.seen)] == [(e, i) for e in range(3) for i in range(5)][:NUM_STEPS]
    samples = sorted(i for epoch, _, ids in module.seen if epoch == 1 for i in ids)
    assert len(samples) == len(set(samples)) == 12
    assert trainer.global_step == NUM_STEPS


class TwoSteps(Counted):
    """Takes two optimizer steps a batch by itself, so that an odd number of steps is exceeded."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        for _ in range(2):
            optimizer.step()
        return loss


def test_steps_that_exceed_their_number_within_an_epoch_leave_its_rest_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "Counted", TwoSteps)
    first = fit(3, callbacks=[Checkpoint(tmp_path / "parts")])
    assert first[1].global_step == 4
    parts = [first, fit(NUM_STEPS, tmp_path / "parts/last.ckpt", callbacks=[Checkpoint(tmp_path / "parts")])]
    whole = fit(NUM_STEPS)
    assert [place for module, _ in parts for place in module.seen] == whole[0].seen


def go_on_in_a_script(steps: int, file: Path) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # of Lightning, under a newer torch

    def trained(steps: int, resume: Path | None = None) -> tuple[Counted, Trainer]:
        return fit(steps, resume, strategy=DDPStrategy(batch_size_is="global", timeout_s=60), devices=2)

    first = trained(steps)
    first[1].save_checkpoint(file)  # by the script: its ranks have ended
    verify_same([first, trained(NUM_STEPS, file)], trained(NUM_STEPS))


@pytest.mark.parametrize("steps", [5, 7])
def test_a_script_saves_where_its_ranks_have_ended(steps: int, tmp_path: Path) -> None:
    run_script(go_on_in_a_script, steps, tmp_path / "own.ckpt")


@pytest.mark.parametrize("steps", [1, 4])
def test_a_schedule_of_accumulation_holds_for_the_rest_of_an_epoch(steps: int, tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        return {"callbacks": [GradientAccumulationScheduler({0: 2, 1: 3})]}

    whole = fit(8, **options())  # 3 steps of an epoch of two batches each, then 2 of three
    first = fit(steps, **options())
    first[1].save_checkpoint(file := tmp_path / "own.ckpt")
    second = fit(8, file, **options())
    assert [place for module, _ in (first, second) for place in module.seen] == whole[0].seen
    for name, value in whole[0].state_dict().items():
        torch.testing.assert_close(second[0].state_dict()[name], value, rtol=0, atol=1e-10)


class Recording(Tiny):
    """Notes the samples of each batch, in a shuffled order, and their means of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = list[float]()
        self.squares, self.all_squares = MeanMetric(), MeanMetric()
        self.means = list[dict[str, float]]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch[0].flatten().tolist()
        self.all_squares.update(batch[0].square())  # of all epochs
        self.log("mean", (batch_idx + 1.0) * batch[0].mean(), on_step=False, on_epoch=True)
        self.squares(self.current_epoch + batch[0].square())
        self.log("squares", self.squares, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        logged = {name: value.item() for name, value in self.trainer.callback_metrics.items()}
        self.means.append({**logged, "all": self.all_squares.compute().item()})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("validates", [False, True])
def test_what_lightnings_callback_saved_after_any_batch_goes_on_with_the_next(
    validates: bool, accumulate: int, tmp_path: Path
) -> None:
    # After the last batch of an epoch the next epoch was empty: the loader's position was given to it.
    def fit(resumed: str | None, *callbacks: pl.Callback) -> Recording:
        torch.manual_seed(0)
        module = Recording()
        data = TensorDataset(torch.arange(8.0).reshape(8, 1))
        loader = DataLoader(data, batch_size=2, shuffle=True)
        options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "num_sanity_val_steps": 0}
        quiet(max_epochs=3, callbacks=list(callbacks), **options).fit(
            module, loader, loader if validates else None, ckpt_path=resumed
        )
        return module

    saver = ModelCheckpoint(tmp_path, "{step}-{epoch}", every_n_train_steps=1, save_top_k=-1)
    of_epochs = ModelCheckpoint(tmp_path / "epochs", save_top_k=-1, save_on_train_epoch_end=True)
    whole = fit(None, saver, of_epochs)
    assert len(whole.seen) == 24
    saved = sorted(tmp_path.glob("*.ckpt"), key=lambda path: int(path.name.split("-")[0].partition("=")[2]))
    lefts: list[int] = []
    for path in saved:
        resumed = fit(str(path))
        lefts.append(len(resumed.seen))
        assert resumed.seen == whole.seen[24 - len(resumed.seen) :], path.name
        assert torch.equal(resumed.layer.weight, whole.layer.weight), path.name
        assert resumed.means == whole.means[3 - len(resumed.means) :], path.name
    per_epoch = -(-4 // accumulate)  # steps
    batches = [4 * (i // per_epoch) + min(accumulate * (i % per_epoch + 1), 4) for i in range(3 * per_epoch)]
    assert lefts == [24 - 2 * num for num in batches]
    for path in (tmp_path / "epochs").glob("*.ckpt"):  # saved before Lightning has cleared what the epoch logged
        resumed = fit(str(path))
        assert resumed.means == whole.means[3 - len(resumed.means) :], path.name


class Counting(IterableDataset[Any]):
    """A stream whose samples can be read once, as those of a queue."""

    num_read = 0

    def __iter__(self) -> Iterator[Any]:
        for index in range(5):
            self.num_read += 1
            yield torch.ones(3, dtype=torch.float64), torch.tensor(index)


def test_a_run_that_goes_on_after_an_epoch_reads_no_more_of_a_stream_than_it_trains_on(tmp_path: Path) -> None:
    # it read the batches of the epoch before, to skip them, and of the next one before that began
    streams = [Counting(), Counting()]
    for stream, num_epochs in zip(streams, (2, 4), strict=True):
        trainer = quiet(max_epochs=num_epochs)
        path = tmp_path / "own.ckpt"
        trainer.fit(Counted(), DataLoader(stream, 1), ckpt_path=path if path.exists() else None)
        trainer.save_checkpoint(path)
    assert [stream.num_read for stream in streams] == [10, 10]
