"""TensorBoard: charts of what is logged, hyperparameters, histograms, graph and images."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from seen import SHORT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from evener.strategies import ConfigError
from evener.trainer import Result, Trainer, compose, train
from evener.trainer.callbacks import Histograms
from evener.trainer.loggers import TensorBoardLogger
from evener.trainer.loggers.hparams import shown


def read(directory: str | Path) -> EventAccumulator:
    log = EventAccumulator(str(directory), size_guidance={"tensors": 100, "histograms": 100, "images": 100})
    log.Reload()
    return log


def charts(log: EventAccumulator) -> dict[str, list[str]]:
    """The titles of the charts by category, as TensorBoard's plugin takes them from the last layout."""
    layout = layout_pb2.Layout.FromString(log.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0])
    return {category.title: [chart.title for chart in category.chart] for category in layout.category}


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Two epochs of digits on one device, with histograms."""
    options = [
        "test_after_fit=true",
        "trainer.max_epochs=2",
        "callbacks=histograms",
    ]
    return train(compose([*SHORT, f"log_dir={tmp_path_factory.mktemp('logs')}", *options]))


def test_one_device_has_charts_of_what_is_logged_only(split: Result) -> None:
    assert charts(read(split.run_dir)) == {
        "Loss and metrics": ["loss", "metrics", "monitored: val/loss"],
        "Speed": ["samples per second", "step time in ms"],
        "Devices": ["peak memory in MiB"],
        "Optimizer": ["learning rate"],
    }


def test_a_chart_appears_with_its_first_value_and_nothing_is_written_before(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_layout("val/loss")
    logger.log_metrics({"train/loss": 1.0}, step=0)
    logger.log_metrics({"train/loss": 0.5}, step=1)
    logger.finalize("success")
    assert charts(read(tmp_path)) == {"Loss and metrics": ["loss"]}
    assert len(read(tmp_path).Tensors("custom_scalars__config__")) == 1
    logger.log_metrics({"val/loss": 1.0, "balance/share_0": 0.5}, step=1)
    logger.close()
    assert charts(read(tmp_path)) == {
        "Loss and metrics": ["loss", "monitored: val/loss"],
        "Devices": ["share of the batch"],
    }


def test_one_event_file_has_all_splits(split: Result) -> None:
    home = Path(split.run_dir)
    names = set(read(home).Tags()["scalars"])
    assert {"train/loss", "val/loss", "val/acc", "test/loss", "test/acc", "lr-AdamW", "speed/step_ms"} <= names
    assert len(list(home.glob("events.*"))) == 1


def test_sub_runs_of_earlier_configurations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sub_runs is no longer there\. All values are in one event file"):
        train(compose([f"log_dir={tmp_path}", "+logger.tensorboard.sub_runs=true"]))


def test_the_strategy_is_a_word_and_booleans_are_words() -> None:
    values = {"strategy/_target_": "dp", "tied": True, "strategy/overlap": False, "lr": 0.1, "sizes": [1, 2]}
    expected = {"strategy": "dp", "tied": "true", "strategy/overlap": "false", "lr": 0.1, "sizes": "[1, 2]"}
    assert shown(values) == expected


def test_a_boolean_of_save_hyperparameters_is_a_word(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams({"tied": True})
    logger.log_final_metrics({"val/loss": 1.0})
    logger.close()
    data: Any = read(tmp_path).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = plugin_data_pb2.HParamsPluginData.FromString(data).session_start_info
    assert start.hparams["tied"].string_value == "true"


def test_histograms_are_of_every_parameter_and_epoch(split: Result) -> None:
    log = read(split.run_dir)
    names = {"features.0", "features.2", "head.0", "head.2"}
    parameters = {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}
    assert set(log.Tags()["histograms"]) == {f"{kind}/{p}" for kind in ("weights", "gradients") for p in parameters}
    points = log.Histograms("weights/head.2.weight")
    assert [point.step for point in points] == [18, 37]
    assert points[0].histogram_value.num == 64 * 10


def test_histograms_of_shards_and_ranks_are_of_whole_tensors(tmp_path: Path) -> None:
    seen = {}
    for strategy in ("fsdp", "ddp"):
        words = [f"strategy={strategy}", "devices=2", "callbacks=histograms", "trainer.max_epochs=1"]
        short = ["trainer.limit_train_batches=3", "data.batch_size=8"]
        result = train(compose([*SHORT, f"log_dir={tmp_path}", *words, *short, "strategy.batch_size_is=global"]))
        seen[strategy] = read(result.run_dir).Histograms("gradients/head.2.weight")[-1].histogram_value
    assert (seen["fsdp"].num, seen["ddp"].num) == (640, 640)
    assert seen["fsdp"].sum_squares == pytest.approx(seen["ddp"].sum_squares, rel=1e-4)


def test_histograms_refuse_an_interval_below_one() -> None:
    with pytest.raises(ValueError, match="every_n_epochs=0 is not allowed"):
        Histograms(0)


def test_images_of_the_digits_are_shown_once_per_validation(split: Result) -> None:
    points = read(split.run_dir).Images("classified")
    assert [(point.step, point.width, point.height) for point in points] == [(19, 64, 64), (38, 64, 64)]


class Tiny(pl.LightningModule):
    def __init__(self, example: torch.Tensor | None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.example_input_array = example

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(4, 3))


def fit(tmp_path: Path, module: Tiny) -> None:
    options: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    Trainer(accelerator="cpu", max_epochs=1, enable_checkpointing=False, logger=logger, **options).fit(module)
    logger.close()


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")  # torch's own add_graph
def test_the_graph_is_shown_by_option(tmp_path: Path) -> None:
    fit(tmp_path, Tiny(torch.ones(1, 3)))
    assert read(tmp_path).Tags()["graph"]


def test_a_graph_without_an_example_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"log_graph=true needs an example input, and Tiny sets none\. Set self\."):
        fit(tmp_path, Tiny(None))
