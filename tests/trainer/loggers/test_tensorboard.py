"""TensorBoard: charts of what is logged, hyperparameters, histograms, graph and images."""

from pathlib import Path
from typing import Any

import pytest
import torch
from seen import SHORT, events
from tensorboard.plugins.hparams import plugin_data_pb2
from tiny import Tiny, quiet

from evener.strategies import ConfigError
from evener.trainer import Result, compose, train
from evener.trainer.callbacks import Histograms
from evener.trainer.loggers import TensorBoardLogger


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Two epochs of digits on one device, with histograms."""
    options = ["test_after_fit=true", "trainer.max_epochs=2", "callbacks=histograms"]
    return train(compose([*SHORT, f"log_dir={tmp_path_factory.mktemp('logs')}", *options]))


def test_sub_runs_of_earlier_configurations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sub_runs is no longer there\. All values are in one event file"):
        train(compose([f"log_dir={tmp_path}", "+logger.tensorboard.sub_runs=true"]))


def test_the_strategy_and_booleans_of_hyperparameters_are_words(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams({"strategy/_target_": "dp", "tied": True, "lr": 0.1, "sizes": [1, 2]})
    logger.log_final_metrics({"val/loss": 1.0})
    logger.close()
    data: Any = events(tmp_path).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = plugin_data_pb2.HParamsPluginData.FromString(data).session_start_info.hparams
    words = {name: found[name].string_value for name in ("strategy", "tied", "sizes")}
    assert words == {"strategy": "dp", "tied": "true", "sizes": "[1, 2]"}
    assert found["lr"].number_value == 0.1


def test_histograms_are_of_every_parameter_and_epoch(split: Result) -> None:
    log = events(split)
    names = {"features.0", "features.2", "head.0", "head.2"}
    parameters = {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}
    assert set(log.Tags()["histograms"]) == {f"{kind}/{p}" for kind in ("weights", "gradients") for p in parameters}
    points = log.Histograms("weights/head.2.weight")
    assert [point.step for point in points] == [18, 37]
    assert points[0].histogram_value.num == 64 * 10
    with pytest.raises(ValueError, match="every_n_epochs=0 is not allowed"):
        Histograms(0)


def test_histograms_of_shards_and_ranks_are_of_whole_tensors(tmp_path: Path) -> None:
    seen = {}
    for strategy in ("fsdp", "ddp"):
        words = [f"strategy={strategy}", "devices=2", "callbacks=histograms", "trainer.max_epochs=1"]
        short = ["trainer.limit_train_batches=3", "data.batch_size=8"]
        result = train(compose([*SHORT, f"log_dir={tmp_path}", *words, *short, "strategy.batch_size_is=global"]))
        seen[strategy] = events(result).Histograms("gradients/head.2.weight")[-1].histogram_value
    assert (seen["fsdp"].num, seen["ddp"].num) == (640, 640)
    assert seen["fsdp"].sum_squares == pytest.approx(seen["ddp"].sum_squares, rel=1e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")  # torch's own add_graph
def test_the_graph_is_shown_by_option(tmp_path: Path) -> None:
    module, logger = Tiny(3), TensorBoardLogger(tmp_path, log_graph=True)
    module.forward = module.layer.forward  # type: ignore[method-assign]
    loader: Any = torch.utils.data.DataLoader(torch.ones(4, 3))  # pyright: ignore[reportArgumentType]
    module.example_input_array = torch.ones(1, 3)
    quiet(logger=logger).fit(module, loader)
    logger.close()
    assert events(tmp_path).Tags()["graph"]
