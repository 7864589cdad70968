"""LightningModules of other projects train unchanged, and as one device does.

Needs `pip install torch==2.13.0 -e ".[test,third-party]"` in an environment of its own; see docs/migrating.md.
"""

import importlib
import warnings
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import pytest
import pytorch_lightning as pl
import torch
from distributed import run_ranks

from evener.strategies import DataParallelStrategy, DDPStrategy, SingleDeviceStrategy
from evener.trainer import Trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # What these packages warn of, on import and in their steps, is theirs: deprecated names of pandas and torch.
    pytest.mark.filterwarnings("ignore"),
]

STRATEGIES: dict[str, Callable[[], Any]] = {
    "lightning": lambda: "auto",
    "single_device": lambda: SingleDeviceStrategy(),
    "dp": lambda: DataParallelStrategy(),
    "ddp": lambda: DDPStrategy(batch_size_is="global"),
}


class Trained(NamedTuple):
    """What a training left behind."""

    weights: dict[str, torch.Tensor]
    metrics: dict[str, float]
    num_steps: int


def panel(num_series: int) -> Any:
    """Monthly series of 36 points each, in the long format of neuralforecast."""
    pandas = importlib.import_module("pandas")
    months = pandas.date_range("2020-01-31", periods=36, freq="ME")
    noise = torch.randn(num_series, 36, generator=torch.Generator().manual_seed(3))
    rows = [
        {"unique_id": f"series {i}", "ds": month, "y": float(i + 0.1 * t * i + (t % 12) + noise[i, t])}
        for i in range(num_series)
        for t, month in enumerate(months)
    ]
    return pandas.DataFrame(rows)


def nhits(**options: Any) -> tuple[pl.LightningModule, Any]:
    """N-HiTS, and a dataset of eleven series. All windows of a series are used, so nothing is drawn at random."""
    models = importlib.import_module("neuralforecast.models")
    tsdataset = importlib.import_module("neuralforecast.tsdataset")
    dataset, *_ = tsdataset.TimeSeriesDataset.from_df(panel(11))
    small = {"mlp_units": 3 * [[16, 16]], "windows_batch_size": None, "learning_rate": 0.01}
    return models.NHITS(h=4, input_size=8, **{**small, **options}), dataset


def neuralforecast() -> tuple[pl.LightningModule, dict[str, Any]]:
    """N-HiTS, and what to fit it on: the data module of its package, with batches of 4, 4 and 3 series."""
    module, dataset = nhits()
    module.val_size, module.test_size = 4, 0  # what the package's own `fit` sets
    tsdataset = importlib.import_module("neuralforecast.tsdataset")
    return module, {"datamodule": tsdataset.TimeSeriesDataModule(dataset, batch_size=4, valid_batch_size=4)}


def tabular(**options: Any) -> Any:
    """A category embedding model of pytorch_tabular, without BatchNorm and dropout: the two exceptions to law 1."""
    package, config = importlib.import_module("pytorch_tabular"), importlib.import_module("pytorch_tabular.config")
    models = importlib.import_module("pytorch_tabular.models")
    return package.TabularModel(
        data_config=config.DataConfig(target=["y"], continuous_cols=["a", "b"], categorical_cols=["kind"]),
        model_config=models.CategoryEmbeddingModelConfig(
            task="regression", layers="16-8", batch_norm_continuous_input=False, metrics=["mean_squared_error"]
        ),
        optimizer_config=config.OptimizerConfig(),
        trainer_config=config.TrainerConfig(
            batch_size=8, accelerator="cpu", max_epochs=2, checkpoints=None, load_best=False, progress_bar="none",
            early_stopping=None, **options,
        ),
        verbose=False, suppress_lightning_logger=True,
    )  # fmt: skip


def table() -> Any:
    """42 rows: the first 30 to train on, in batches of 8, 8, 8 and 6."""
    values = torch.randn(42, 3, generator=torch.Generator().manual_seed(4)).numpy()
    frame = importlib.import_module("pandas").DataFrame(values, columns=["a", "b", "y"])
    frame["kind"] = [("red", "green", "blue")[i % 3] for i in range(42)]
    frame["y"] += frame["a"] * 2 + (frame["kind"] == "red")
    return frame


def pytorch_tabular() -> tuple[pl.LightningModule, dict[str, Any]]:
    """The model, and the loaders of its package, which its own `fit` passes in the same way."""
    model = tabular()
    data = model.prepare_dataloader(train=table()[:30], validation=table()[30:], seed=1)
    loaders = {"train_dataloaders": data.train_dataloader(), "val_dataloaders": data.val_dataloader()}
    return model.prepare_model(data), loaders


def train(package: str, strategy: str, num_devices: int, num_epochs: int = 2) -> Trained:
    """Train in float64. Runs in every rank."""
    warnings.simplefilter("ignore")  # as above
    pl.seed_everything(7, verbose=False)
    module, data = globals()[package]()
    trainer = (pl.Trainer if strategy == "lightning" else Trainer)(
        strategy=STRATEGIES[strategy](), devices=num_devices, accelerator="cpu", precision="64-true",
        max_epochs=num_epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, **data)
    # those of an epoch; what pytorch_tabular calls train_loss is a rank's own, of its last step
    metrics = {
        key: float(value)
        for key, value in trainer.callback_metrics.items()
        if key != "train_loss" and not key.endswith("_step")
    }
    return Trained({key: value.clone() for key, value in module.state_dict().items()}, metrics, trainer.global_step)


def needs(package: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as exc:
        pytest.skip(f'{package} is not installed ({exc}); pip install -e ".[third-party]"')


@pytest.fixture(scope="module", autouse=True)
def _own_folder(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("third_party"))  # some of them write where they are
        yield


@pytest.fixture(scope="module", params=["neuralforecast", "pytorch_tabular"])
def package(request: pytest.FixtureRequest) -> str:
    needs(request.param)
    return request.param


@pytest.fixture(scope="module")
def alone(package: str) -> Trained:
    return train(package, "single_device", 1)


def test_one_device_trains_as_lightning_does(package: str) -> None:
    """One epoch: Lightning's validation draws from the random stream that shuffles the next one (docs/migrating.md)."""
    alone, stock = (train(package, strategy, 1, num_epochs=1) for strategy in ("single_device", "lightning"))
    assert alone.num_steps == stock.num_steps == {"neuralforecast": 3, "pytorch_tabular": 4}[package]
    torch.testing.assert_close(alone.weights, stock.weights, rtol=0, atol=0)
    assert len(alone.metrics) >= 3
    assert alone.metrics == pytest.approx(stock.metrics, abs=1e-12)


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_two_devices_train_as_one_does(package: str, alone: Trained, strategy: str) -> None:
    ranks = run_ranks(train, 2, package, strategy, 2, timeout_s=300) if strategy == "ddp" else [train(package, "dp", 2)]
    for trained in ranks:
        assert trained.num_steps == alone.num_steps == {"neuralforecast": 2 * 3, "pytorch_tabular": 2 * 4}[package]
        torch.testing.assert_close(trained.weights, alone.weights, rtol=0, atol=1e-10)
    assert ranks[0].metrics == pytest.approx(alone.metrics, abs=1e-10)


def neuralforecast_alone(**options: Any) -> dict[str, torch.Tensor]:
    """Weights after the package's own `fit`, which makes a stock `pl.Trainer`."""
    module, dataset = nhits(
        max_steps=6, batch_size=4, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip
    module.fit(dataset, val_size=4)
    return module.state_dict()


def pytorch_tabular_alone(**options: Any) -> dict[str, torch.Tensor]:
    strategy = {"trainer_kwargs": {"strategy": options.pop("strategy")}} if "strategy" in options else {}
    model = tabular(devices=options["devices"], **strategy)
    model.fit(train=table()[:30], validation=table()[30:], seed=1)
    return model.model.state_dict()


@pytest.mark.parametrize("own_fit", [neuralforecast_alone, pytorch_tabular_alone])
def test_a_packages_own_fit_takes_our_strategy(own_fit: Callable[..., dict[str, torch.Tensor]]) -> None:
    """`import evener.strategies` is all that a script of theirs has to add for `strategy="dp", devices=2`."""
    needs(own_fit.__name__.removesuffix("_alone"))
    torch.testing.assert_close(own_fit(strategy="dp", devices=2), own_fit(devices=1), rtol=0, atol=1e-5)
