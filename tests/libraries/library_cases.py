"""The smallest module of each library that trains on made-up data.

Each is (module, data) as `trainer.fit(module, **data)` takes them, in float64 and without dropout. BatchNorm, which law
1 names as an exception, gives way to GroupNorm.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

Made = tuple[Any, dict[str, Any]]
NUM_SAMPLES = 11


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(**columns: Tensor) -> DataLoader[Any]:
    """Batches of 4, 4 and 3 dicts."""
    samples = [{name: column[i] for name, column in columns.items()} for i in range(NUM_SAMPLES)]
    return DataLoader(samples, batch_size=4)  # pyright: ignore[reportArgumentType]


def both(loader: Callable[[], Any]) -> dict[str, Any]:
    return {"train_dataloaders": loader(), "val_dataloaders": loader()}


def without_batchnorm(module: Any) -> Any:
    instead: dict[nn.Module, nn.Module] = {}
    for name, child in list(module.named_modules(remove_duplicate=False)):  # TerraTorch has an encoder under two names
        if isinstance(child, nn.BatchNorm2d):
            parent, _, last = name.rpartition(".")
            new = instead.setdefault(child, nn.GroupNorm(1, child.num_features))
            setattr(module.get_submodule(parent), last, new)
    return module


def doubled(item: Any) -> Any:
    return item.double() if isinstance(item, Tensor) and item.is_floating_point() else item


def chemprop() -> Made:
    """A message passing network on molecules; its batches are TrainingBatch, a NamedTuple with a BatchMolGraph."""
    data, models, parts = (importlib.import_module(f"chemprop.{name}") for name in ("data", "models", "nn"))
    smiles = ["CC", "CCO", "CCN", "CCC", "c1ccccc1", "CO", "CCCl", "CC(C)O", "C=C", "C#N", "CCCC"]
    points = [data.MoleculeDatapoint.from_smi(smi, y=[float(i % 4)]) for i, smi in enumerate(smiles)]
    model = models.MPNN(
        parts.BondMessagePassing(d_h=8, depth=2), parts.MeanAggregation(),
        parts.RegressionFFN(input_dim=8, hidden_dim=8),
    )  # fmt: skip

    def collate(samples: list[Any]) -> Any:  # the library featurizes in float32
        batch = data.collate_batch(samples)
        batch.bmg.V, batch.bmg.E = doubled(batch.bmg.V), doubled(batch.bmg.E)
        return type(batch)(*map(doubled, batch))

    return model, both(lambda: DataLoader(data.MoleculeDataset(points), batch_size=4, collate_fn=collate))


def scvi() -> Made:
    """The classifier of scvi-tools in its training plan; its other models draw latent variables at random."""
    plan = importlib.import_module("scvi.train").ClassifierTrainingPlan
    classifier = importlib.import_module("scvi.module").Classifier(
        n_input=4, n_hidden=8, n_labels=3, n_layers=1, dropout_rate=0.0, use_batch_norm=False, use_layer_norm=True,
        logits=True,
    )  # fmt: skip
    x = torch.randn(NUM_SAMPLES, 4, generator=generator(), dtype=torch.float64)
    labels = (torch.arange(NUM_SAMPLES) % 3)[:, None]
    return plan(classifier, lr=0.01), both(lambda: rows(X=x, labels=labels))


def pytorch_forecasting() -> Made:
    """N-BEATS on eleven series; its batches are (dict, (target, weight))."""
    package, pandas = importlib.import_module("pytorch_forecasting"), importlib.import_module("pandas")
    g = generator()
    frame = pandas.DataFrame(
        {"t": t, "series": str(s), "y": float(s + t % 4 + torch.randn((), generator=g))}
        for s in range(11)
        for t in range(12)
    )
    dataset = package.TimeSeriesDataSet(
        frame, time_idx="t", target="y", group_ids=["series"], min_encoder_length=8, max_encoder_length=8,
        min_prediction_length=4, max_prediction_length=4, time_varying_unknown_reals=["y"],
        target_normalizer=importlib.import_module("pytorch_forecasting.data").TorchNormalizer(method="identity"),
    )  # fmt: skip
    model = package.NBeats.from_dataset(dataset, learning_rate=0.01, widths=[8, 8], dropout=0.0, log_interval=-1)

    def collate(samples: list[Any]) -> Any:
        return tree_map(doubled, dataset._collate_fn(samples))

    return model, both(lambda: DataLoader(dataset, batch_size=4, collate_fn=collate))


def gluonts() -> Made:
    """The simple feed-forward network of GluonTS; its batches are dicts of series."""
    model = importlib.import_module("gluonts.torch.model.simple_feedforward.lightning_module")
    module = model.SimpleFeedForwardLightningModule(
        {"prediction_length": 2, "context_length": 6, "hidden_dimensions": [8], "batch_norm": False}
    )
    g = generator()
    past = torch.randn(NUM_SAMPLES, 6, generator=g, dtype=torch.float64).cumsum(1)
    future = past[:, -2:] + torch.randn(NUM_SAMPLES, 2, generator=g, dtype=torch.float64)
    seen = {"future_observed_values": torch.ones_like(future), "past_observed_values": torch.ones_like(past)}
    return module, both(lambda: rows(past_target=past, future_target=future, **seen))


def torchgeo() -> Made:
    """The classification task of TorchGeo, with its metrics; batches are dicts of images and labels."""
    tasks = importlib.import_module("torchgeo.trainers")
    task = tasks.ClassificationTask(model="resnet10t", weights=None, in_channels=3, num_classes=3, lr=0.01)
    image = torch.rand(NUM_SAMPLES, 3, 32, 32, generator=generator(), dtype=torch.float64)
    return without_batchnorm(task), both(lambda: rows(image=image, label=torch.arange(NUM_SAMPLES) % 3))


def doubled_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(map(doubled, args))


def anomalib() -> Made:
    """Reverse distillation of Anomalib on random weights; batches are ImageBatch, a dataclass of its own."""
    models, items = importlib.import_module("anomalib.models"), importlib.import_module("anomalib.data")
    processing = importlib.import_module("anomalib.pre_processing")
    transforms = importlib.import_module("torchvision.transforms.v2")
    model = models.ReverseDistillation(
        backbone="resnet18", layers=["layer1", "layer2", "layer3"], pre_trained=False, evaluator=False,
        visualizer=False, post_processor=False, pre_processor=processing.PreProcessor(transforms.Resize((64, 64))),
    )  # fmt: skip
    model.model.register_forward_pre_hook(doubled_input)  # its items are float32, whatever they are given
    images = torch.rand(NUM_SAMPLES, 3, 64, 64, generator=generator(), dtype=torch.float64)
    samples = [items.ImageItem(image=image, gt_label=torch.tensor(False)) for image in images]
    loader: Any = lambda: DataLoader(samples, batch_size=4, collate_fn=items.ImageBatch.collate)  # noqa: E731
    return without_batchnorm(model), {"train_dataloaders": loader()}


CASES: dict[str, Callable[[], Made]] = {
    make.__name__: make for make in (chemprop, scvi, pytorch_forecasting, gluonts, torchgeo, anomalib)
}
