"""What people see: the dashboard's data, the start-up block, the lines of epochs."""

import io
import json
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from pytorch_lightning.callbacks import RichProgressBar
from seen import SHORT, charts, events
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import Points, Tiny, quiet
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

from evener.strategies import DataParallelStrategy, DDPStrategy
from evener.strategies.batch.policies import FirstChunk
from evener.strategies.core.patching import LIGHTNING_TELLS
from evener.trainer import Result, compose, train
from evener.trainer.callbacks import EpochLines, GradientNorm
from evener.trainer.callbacks.start_up import batch_line, checkpoint_policy, cut_line
from evener.trainer.callbacks.step_times import DDPTimes
from evener.trainer.checkpoint._callback import Checkpoint
from evener.trainer.job import run as run_module
from evener.trainer.job.log_file import run_log
from evener.trainer.job.result import short_path
from evener.trainer.job.summary import memory_text, shares_text, show_summary
from evener.trainer.loggers.tensorboard import layout


class Line(Tiny):
    """y = w·x with loss w·mean(x): the gradient of each weight is the mean of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1, bias=False)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch[0]).mean()
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.tensor([[3.0, 4.0]] * 8)), batch_size=4)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Two epochs of six steps on two replicas, logged every second step, with the gradient's norm."""
    options = ["strategy=dp", "devices=2", "callbacks=gradient_norm", "trainer.limit_train_batches=6"]
    home = f"log_dir={tmp_path_factory.mktemp('logs')}"
    return train(compose([*SHORT, home, *options, "trainer.max_epochs=2", "trainer.log_every_n_steps=2"]))


def shown(log: EventAccumulator, category: str, chart: str) -> set[str]:
    """The tags that a chart shows, matched as TensorBoard's custom_scalars plugin does."""
    expressions = charts(log)[category][chart]
    return {tag for tag in log.Tags()["scalars"] if any(re.match(e, tag) for e in expressions)}


def test_the_layout_opens_on_loss_and_metrics(digits: Result) -> None:
    log = events(digits)
    assert list(charts(log)) == ["Loss and metrics", "Speed", "Devices", "Optimizer"]
    assert shown(log, "Loss and metrics", "loss") == {"train/loss", "val/loss"}
    assert shown(log, "Loss and metrics", "metrics") == {"val/acc"}
    assert shown(log, "Loss and metrics", "monitored: val/loss") == {"val/loss"}
    assert shown(log, "Speed", "samples per second") == {"speed/samples_per_s"}
    assert shown(log, "Speed", "step time in ms") == {"speed/step_ms", "speed/compute_ms", "speed/data_wait_ms"}
    assert shown(log, "Devices", "share of the batch") == {"balance/share_0", "balance/share_1"}
    assert shown(log, "Devices", "peak memory in MiB") == {"device/peak_memory_mib_0", "device/peak_memory_mib_1"}
    assert shown(log, "Optimizer", "learning rate") == {"lr-AdamW"}
    assert shown(log, "Optimizer", "gradient norm") == {"gradient/norm"}


def test_the_layout_knows_the_tags_of_balanced_strategies() -> None:
    devices = layout("val/loss")["Devices"]
    tags = ["balance/share_1", "balance/time_s_1", "device/peak_memory_mib_1", "balance/efficiency"]
    for chart, tag in zip(devices.values(), tags, strict=True):
        assert [other for other in tags if re.match(chart[1][0], other)] == [tag]


def test_no_chart_of_metrics_shows_our_own_tags() -> None:
    metrics = layout(None)["Loss and metrics"]
    for tag in ("speed/step_ms", "device/peak_memory_mib_0", "balance/efficiency", "gradient/norm", "lr-SGD", "epoch"):
        assert not any(re.match(chart[1][0], tag) for chart in metrics.values()), tag
    assert re.match(metrics["metrics"][1][0], "epochs_without_errors")
    assert re.match(metrics["loss"][1][0], "valLoss")


def test_a_dot_in_the_monitored_name_stands_for_itself(tmp_path: Path) -> None:
    (expression,) = layout("val.acc")["Loss and metrics"]["monitored: val.acc"][1]
    assert re.match(expression, "val.acc")
    assert not re.match(expression, "val_acc")


def test_speed_has_a_point_per_log_point(digits: Result) -> None:
    log = events(digits)
    for name in ("samples_per_s", "step_ms", "compute_ms", "data_wait_ms"):
        points = log.Scalars(f"speed/{name}")
        assert [point.step for point in points] == [1, 3, 5, 7, 9, 11]
        assert all(point.value > 0 for point in points)
    step, compute, wait = (log.Scalars(f"speed/{name}") for name in ("step_ms", "compute_ms", "data_wait_ms"))
    for whole, *parts in zip(step, compute, wait, strict=True):
        assert sum(part.value for part in parts) < whole.value * 1.001
    for speed, time in zip(log.Scalars("speed/samples_per_s"), step, strict=True):
        assert speed.value * time.value / 1000 == pytest.approx(64, rel=1e-4)


def test_devices_have_a_point_per_epoch(digits: Result) -> None:
    log = events(digits)
    assert [(point.step, point.value) for point in log.Scalars("balance/share_1")] == [(5, 0.5), (11, 0.5)]
    memory = [point.value for point in log.Scalars("device/peak_memory_mib_0")]
    assert len(memory) == 2
    assert 50 < memory[0] <= memory[1] == pytest.approx(digits.peak_memory_mib[0], rel=0.05)


def test_the_partition_plan_is_in_the_text_tab(digits: Result) -> None:
    (event,) = events(digits).Tensors("partition/text_summary")
    lines = [line.strip() for line in event.tensor_proto.string_val[0].decode().splitlines()]
    assert "global batch 64 = 2 replicas × 32 samples" in lines
    assert lines[-3:] == ["device       samples", "0       cpu  32", "1       cpu  32"]


def test_the_start_up_block_tells_what_will_run(digits: Result) -> None:
    text = (Path(digits.run_dir) / "train.log").read_text()
    block = text[text.index("  strategy ") :].splitlines()[:8]
    assert [tuple(re.split("  +", line.strip())) for line in block] == [
        ("strategy", "dp"),
        ("devices", "2 × cpu"),
        ("processes", "1"),
        ("global batch", "64 = 2 replicas × 32 samples"),
        ("precision", "32-true"),
        ("parameters", "38,282"),
        ("checkpoints", "the best by val/loss (min) and the last, every epoch"),
        ("run directory", digits.run_dir),
    ]
    assert "GPU available" not in text


def test_without_a_terminal_an_epoch_is_one_line(digits: Result) -> None:
    text = (Path(digits.run_dir) / "train.log").read_text()
    lines = re.findall(r"epoch \d.*", text)
    assert len(lines) == 2
    assert text.index(lines[1]) < text.index("`Trainer.fit` stopped")
    (value,) = re.findall(r"val/loss ([\d.]+)", lines[1])
    assert float(value) == pytest.approx(digits.metrics["val/loss"], rel=1e-3)
    assert lines[0].startswith("epoch 0/1 · step 6 · ")  # counted as in the names of checkpoints


def test_a_bar_has_ended_when_lightning_says_why_training_does() -> None:
    # its last line stood below, as if training went on
    bar = RichProgressBar(console_kwargs={"force_terminal": True, "file": io.StringIO()})
    drawn: list[bool] = []

    class Look(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "`Trainer.fit` stopped" in record.getMessage():
                drawn.append(bar.progress is not None and bar.progress.live.is_started)

    trainer = quiet(pl.Trainer, callbacks=[bar, EpochLines()], enable_progress_bar=True)
    tells = logging.getLogger(LIGHTNING_TELLS[0])
    tells.addHandler(look := Look())
    trainer.fit(Line())
    tells.removeHandler(look)
    assert drawn == [False]


@pytest.mark.parametrize("own", [[], ["+callbacks.bar._target_=pytorch_lightning.callbacks.TQDMProgressBar"]])
def test_a_bar_is_drawn_on_a_terminal_only(own: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cfg = compose(["accelerator=cpu", f"run_dir={tmp_path}", *own])
    for terminal in (True, False):
        console = SimpleNamespace(is_terminal=terminal, is_jupyter=False)
        monkeypatch.setattr(run_module, "Console", lambda console=console: console)
        trainer = run_module.build(OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))).trainer
        assert (trainer.progress_bar_callback is not None) is terminal
        assert any(isinstance(callback, EpochLines) for callback in trainer.callbacks)


def test_an_epoch_line_shows_the_means_of_its_own_epoch(caplog: pytest.LogCaptureFixture) -> None:
    class Means(Line):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            self.log("mean", float(10 * self.current_epoch + batch_idx), on_step=False, on_epoch=True, prog_bar=True)
            return self.layer(batch[0]).mean()

    with caplog.at_level(logging.INFO, logger="evener"):
        quiet(max_epochs=2, callbacks=[EpochLines()]).fit(Means())
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("epoch")]
    assert [line.rsplit(" · ", 1)[1] for line in told] == ["mean 0.5", "mean 10.5"]


def test_the_gradient_norm_is_the_unclipped_one() -> None:
    logger = Points()
    quiet(logger=logger, log_every_n_steps=1, gradient_clip_val=0.1, callbacks=[GradientNorm()]).fit(Line())
    assert logger.of("gradient/norm") == [(0, pytest.approx(5.0)), (1, pytest.approx(5.0))]  # of (3, 4)


def test_torch_still_measures_ddp(tmp_path: Path) -> None:
    """The names that `DDPTimes` reads."""
    told = tmp_path / "told"  # by the rank's own process

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            times = DDPTimes.of(trainer)
            assert times is not None
            if trainer.global_rank:
                return
            seen = [times.exposed_communication_ms(), times.own_compute_s()]
            if None not in seen:
                data = trainer.strategy.model._get_ddp_logging_data()  # pyright: ignore  # in nanoseconds
                exposed = data["backward_comm_time"] - data["backward_compute_comm_overlap_time"]
                computed = data["forward_compute_time"] + data["backward_compute_time"]
                seen += [max(0.0, exposed / 1e6), computed / 1e9]
                with pytest.MonkeyPatch.context() as patch:  # the ranks have lost one, and go on with another wrapper
                    patch.setattr(trainer.strategy.model, "logger", None)
                    assert times.exposed_communication_ms() is None
            told.write_text((told.read_text() if told.exists() else "") + json.dumps(seen) + "\n")

    quiet(strategy=DDPStrategy(), devices=2, max_epochs=2, log_every_n_steps=1, callbacks=[Look()]).fit(Line())
    first, second = map(json.loads, told.read_text().splitlines())
    assert first == [None, None]
    assert second[:2] == pytest.approx(second[2:])
    assert second[1] > 0


@pytest.mark.parametrize(
    ("sizes", "part", "line"),
    [
        ([64] * 4, "rank", "256 = 4 ranks × 64 samples"),
        ([16, 24, 24], "replica", "64 = 16 + 24 + 24 samples on 3 replicas"),
        ([2000], "device", "2,000 samples"),
    ],
)
def test_a_cut_is_written_as_a_sum(sizes: list[int], part: str, line: str) -> None:
    assert cut_line(sizes, part) == line


def test_the_batch_line_counts_accumulation_and_uneven_chunks() -> None:
    told: list[str] = []

    class Look(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            told.append(batch_line(trainer))

    strategy = DataParallelStrategy(devices=["cpu", "cpu"])
    strategy.policy = FirstChunk(1)
    quiet(strategy=strategy, accumulate_grad_batches=2, callbacks=[Look()]).fit(Line())
    assert told == ["4 = 1 + 3 samples on 2 replicas; an optimizer step takes 2 of them, 8 samples"]


POLICIES = [
    ({"monitor": "val/loss"}, "the best by val/loss (min) and the last, every epoch"),
    ({"monitor": "acc", "mode": "max", "save_top_k": 3}, "the best 3 by acc (max) and the last, every epoch"),
    ({"every_n_steps": 1000, "save_last": False}, "the newest, every 1,000 steps"),
    ({"interval_s": 900, "save_top_k": 0}, "the last, every 900 s"),
]


@pytest.mark.parametrize(("options", "told"), POLICIES)
def test_a_checkpoint_policy_is_told_in_words(options: dict[str, Any], told: str) -> None:
    assert checkpoint_policy(Checkpoint(**options)) == told


def test_equal_peaks_are_told_once() -> None:
    assert memory_text([812.2, 812.4]) == "812 MiB"
    assert memory_text([1812.0, 790.0]) == "1,812, 790 MiB"
    assert memory_text([]) == ""


def test_the_closing_table_has_the_shares_of_a_balanced_run() -> None:
    metrics = {"balance/efficiency": 0.896, "balance/share_0": 0.46875, "balance/share_1": 0.53125}
    assert shares_text(metrics) == "47%, 53%, efficiency 0.90"
    assert shares_text({"train/loss": 1.0}) == ""


def test_tensorboard_is_named_where_it_has_something_to_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = Result("fit", "dp", ["cpu"], 1, str(tmp_path), {"train/loss": 0.5, "val/acc": 0.25})
    show_summary(result)
    told = capsys.readouterr().out
    assert "tensorboard --logdir" not in told
    SummaryWriter(str(tmp_path)).close()
    show_summary(result)
    assert "tensorboard --logdir logs" in capsys.readouterr().out


def test_the_closing_table_is_whole_at_80_columns_and_shows_what_was_logged_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / ("long" * 20)
    metrics = {"train/loss": 0.5, "train/loss_epoch": 0.5, "train/loss_step": 0.4, "val/acc": 0.25, "lr-Adam": 0.1}
    show_summary(Result("fit", "dp", [f"cuda:{i}" for i in range(10)], 1, str(run_dir), metrics))
    told = capsys.readouterr().out.splitlines()
    table = [line for line in told if line.startswith("│")]
    assert {len(line) for line in table} == {80}
    assert [line.split()[1] for line in table] == ["strategy", "devices", "│", "train/loss", "val/acc"]
    assert told[-1] == f"run directory  {short_path(str(run_dir))}", "a path that is cut can't be pasted"


def test_a_line_goes_to_the_output_that_a_bar_has_put_in_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with run_log(tmp_path):
        monkeypatch.setattr(sys, "stdout", above := io.StringIO())
        logging.getLogger("evener").info("epoch 0")
    assert above.getvalue() == "epoch 0\n"
