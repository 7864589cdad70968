"""The smallest module of each library that trains on made-up data.

Each is (module, data) as `trainer.fit(module, **data)` takes them, in float64 and without dropout. BatchNorm, which law
1 names as an exception, gives way to GroupNorm.
"""

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from model_cases import without_randomness
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, dataloader
from zoo import NUM_SAMPLES, TOLERANCE, Case, generator

Made = tuple[Any, dict[str, Any]]

vars(dataloader).setdefault("T_co", TypeVar("T_co", covariant=True))  # schnetpack imports it; torch had it


def load(package: str, *parts: str) -> list[Any]:
    return [importlib.import_module(f"{package}.{part}" if part else package) for part in parts]


def drawn(*shape: int, g: torch.Generator | None = None) -> Tensor:
    return torch.randn(NUM_SAMPLES, *shape, generator=g or generator(), dtype=torch.float64)


def rows(**columns: Tensor) -> DataLoader[Any]:
    """Batches of 4, 4 and 3 dicts."""
    samples = [{name: column[i] for name, column in columns.items()} for i in range(NUM_SAMPLES)]
    return DataLoader(samples, batch_size=4)  # pyright: ignore[reportArgumentType]


def both(loader: Callable[[], Any]) -> dict[str, Any]:
    return {"train_dataloaders": loader(), "val_dataloaders": loader()}


def doubled(item: Any) -> Any:
    return item.double() if isinstance(item, Tensor) and item.is_floating_point() else item


def chemprop() -> Made:
    """A message passing network on molecules; its batches are TrainingBatch, a NamedTuple with a BatchMolGraph."""
    data, models, parts = load("chemprop", "data", "models", "nn")
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
    labels = (torch.arange(NUM_SAMPLES) % 3)[:, None]
    return plan(classifier, lr=0.01), both(lambda: rows(X=drawn(4), labels=labels))


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
    past = drawn(6, g=g).cumsum(1)
    future = past[:, -2:] + drawn(2, g=g)
    seen = {"future_observed_values": torch.ones_like(future), "past_observed_values": torch.ones_like(past)}
    return module, both(lambda: rows(past_target=past, future_target=future, **seen))


def torchgeo() -> Made:
    """The classification task of TorchGeo, with its metrics; batches are dicts of images and labels."""
    tasks = importlib.import_module("torchgeo.trainers")
    task = tasks.ClassificationTask(model="resnet10t", weights=None, in_channels=3, num_classes=3, lr=0.01)
    image = torch.rand(NUM_SAMPLES, 3, 32, 32, generator=generator(), dtype=torch.float64)
    return without_randomness(task), both(lambda: rows(image=image, label=torch.arange(NUM_SAMPLES) % 3))


def anomalib() -> Made:
    """Reverse distillation of Anomalib on random weights; batches are ImageBatch, a dataclass of its own."""
    models, items, processing = load("anomalib", "models", "data", "pre_processing")
    transforms = importlib.import_module("torchvision.transforms.v2")
    model = models.ReverseDistillation(
        backbone="resnet18", layers=["layer1", "layer2", "layer3"], pre_trained=False, evaluator=False,
        visualizer=False, post_processor=False, pre_processor=processing.PreProcessor(transforms.Resize((64, 64))),
    )  # fmt: skip
    # its items are float32, whatever they are given
    model.model.register_forward_pre_hook(lambda module, args: tuple(map(doubled, args)))
    images = torch.rand(NUM_SAMPLES, 3, 64, 64, generator=generator(), dtype=torch.float64)
    samples = [items.ImageItem(image=image, gt_label=torch.tensor(False)) for image in images]
    loader = DataLoader(samples, batch_size=4, collate_fn=items.ImageBatch.collate)  # pyright: ignore
    return without_randomness(model), {"train_dataloaders": loader}


def nequip() -> Made:
    """An energy model of NequIP; its batch is one graph of all atoms, its loss a metric over all ranks."""
    importlib.import_module("nequip.utils.global_state").set_global_state()
    data, train, lists = load("nequip", "data", "train", "data._nl")
    g = generator()

    def molecule(num_atoms: int) -> Any:
        drawn = {name: torch.randn(num_atoms, 3, generator=g, dtype=torch.float64) for name in ("pos", "forces")}
        energy = torch.randn(1, 1, generator=g, dtype=torch.float64)
        atoms = data.from_dict({**drawn, "atom_types": torch.arange(num_atoms) % 2, "total_energy": energy})
        return lists.compute_neighborlist_(atoms, r_max=4.0, backend="ase")

    molecules = [molecule(3 + i % 3) for i in range(NUM_SAMPLES)]
    model = {
        "_target_": "nequip.model.NequIPGNNModel", "seed": 1, "model_dtype": "float64", "type_names": ["H", "O"],
        "r_max": 4.0, "num_layers": 1, "num_features": 4, "radial_mlp_width": 8, "avg_num_neighbors": 3.0,
        "per_type_energy_scales": 1.0, "per_type_energy_shifts": 0.0, "compile_mode": "eager",
    }  # fmt: skip
    module = train.NequIPLightningModule(
        model, {"train": 1, "val": 1, "test": 0, "predict": 0}, {"_target_": "torch.optim.Adam", "lr": 0.01},
        loss={"_target_": "nequip.train.EnergyForceLoss"}, val_metrics={"_target_": "nequip.train.EnergyForceMetrics"},
    )  # fmt: skip
    collate = data.AtomicDataDict.batched_from_list
    return module, both(lambda: DataLoader(molecules, batch_size=4, collate_fn=collate))


def pyannote() -> Made:
    """Voice activity detection of pyannote.audio; its module has a task, and the task the module."""
    core, protocols = importlib.import_module("pyannote.core"), importlib.import_module("pyannote.database.protocol")
    models = importlib.import_module("pyannote.audio.models.segmentation.debug")
    noise = torch.randn(1, NUM_SAMPLES * 16000, generator=generator())
    speech = core.Annotation()
    for i in range(NUM_SAMPLES):
        speech[core.Segment(i, i + i / NUM_SAMPLES + 0.05)] = "speaker"

    class Recording(protocols.SpeakerDiarizationProtocol):
        name = "made.up.protocol"

        def train_iter(self) -> Any:
            described = {"uri": "noise", "database": "made_up", "audio": "noise.wav", "scope": "file"}
            yield {**described, "annotation": speech, "annotated": core.Timeline([core.Segment(0, NUM_SAMPLES)])}

        development_iter = train_iter

    class Detection(importlib.import_module("pyannote.audio.tasks").VoiceActivityDetection):
        def get_file(self, file_id: int) -> dict[str, Any]:
            return {"waveform": noise, "sample_rate": 16000}

        def default_loss(self, specifications: Any, target: Tensor, prediction: Tensor, weight: Any = None) -> Tensor:
            return nn.functional.binary_cross_entropy(prediction, target.double())  # the library's casts to float32

    # batch_size: of the pictures that it draws of its validation
    task = Detection(Recording(), duration=1.0, batch_size=1, num_workers=0)
    module = models.SimpleSegmentationModel(task=task)
    module.prepare_data()

    class Seconds(Dataset[Any]):
        def __len__(self) -> int:
            return NUM_SAMPLES

        def __getitem__(self, index: int) -> Any:
            return task.prepare_chunk(0, float(index), 0.99)

    def collate(samples: list[Any]) -> Any:
        return tree_map(doubled, task.collate_fn(samples, stage="val"))

    return module, both(lambda: DataLoader(Seconds(), batch_size=4, collate_fn=collate))


def rl4co(baseline: str = "no") -> Made:
    """The attention model of RL4CO on travelling salesmen, which decodes greedily; batches are TensorDicts."""
    models, data, envs = load("rl4co", "models", "data.dataset", "envs")
    env = envs.TSPEnv(generator_params={"num_loc": 6})
    policy = models.AttentionModelPolicy(
        env_name="tsp", embed_dim=16, num_encoder_layers=1, num_heads=2, feedforward_hidden=8,
        normalization="instance", train_decode_type="greedy",
    )  # fmt: skip
    # not Adam: the gradient of a bias before a normalization is 0, of which rounding makes a step of the full size
    module = models.AttentionModel(
        env, policy, baseline, batch_size=4, train_data_size=NUM_SAMPLES, val_data_size=NUM_SAMPLES, optimizer="SGD",
        optimizer_kwargs={"lr": 0.01},
    )  # fmt: skip
    places = torch.rand(NUM_SAMPLES, 6, 2, generator=generator(), dtype=torch.float64)
    towns = importlib.import_module("tensordict").TensorDict({"locs": places}, batch_size=[NUM_SAMPLES])
    salesmen = data.TensorDictDataset(towns)
    return module, both(lambda: DataLoader(salesmen, batch_size=4, collate_fn=salesmen.collate_fn))


def terratorch() -> Made:
    """The segmentation task of TerraTorch on a small network of timm, whose `forward` its wrapper takes over."""
    tasks = importlib.import_module("terratorch.tasks")
    network = {
        "backbone": "timm_resnet10t", "backbone_pretrained": False, "backbone_in_chans": 3, "num_classes": 3,
        "decoder": "FCNDecoder", "decoder_channels": 8, "decoder_num_convs": 1, "necks": [], "rescale": True,
    }  # fmt: skip
    task = tasks.SemanticSegmentationTask(network, "EncoderDecoderFactory", lr=0.01, optimizer="SGD", ignore_index=-100)
    image = torch.rand(NUM_SAMPLES, 3, 32, 32, generator=generator(), dtype=torch.float64)
    mask = torch.randint(0, 3, (NUM_SAMPLES, 32, 32), generator=generator())
    task, encoder = without_randomness(task), task.model.encoder
    encoder.forward.__self__._modules.update(encoder._modules)  # whose layers it runs, the replaced one of the top too
    return task, both(lambda: rows(image=image, mask=mask))


def mean_absolute_error(targets: Any, predictions: Any) -> float:
    return float(abs(targets - predictions).mean())


def deeptab() -> Made:
    """The multi-layer perceptron of DeepTab; its batches are ((list, list, list), labels), its metrics its own."""
    training, data, architectures, configs = load("deeptab", "training", "data", "architectures", "configs")
    metric = importlib.import_module("torchmetrics").MeanSquaredError
    features = {f"x{i}": {"preprocessing": "none", "dimension": 1, "categories": None} for i in range(3)}
    task = training.TaskModel(
        architectures.MLP, configs.MLPConfig(layer_sizes=[8, 8], dropout=0.0), (features, {}, {}), lr=0.01,
        optimizer_type="SGD", train_metrics={"mse": metric()},
        val_metrics={"mse": metric(), "mae": mean_absolute_error},
    )  # fmt: skip
    g = generator()
    columns = [drawn(1, g=g) for _ in features]
    dataset = data.TabularDataset([], columns, labels=drawn(1, g=g))
    return task, both(lambda: DataLoader(dataset, batch_size=4))


def schnetpack() -> Made:
    """A potential of SchNetPack with forces; its batches are dicts of all atoms and all pairs, in a row."""
    package, task, atomistic, keys, models = load("schnetpack", "", "task", "atomistic", "properties", "model")
    metrics = importlib.import_module("torchmetrics")
    torch.set_default_dtype(torch.float32)  # the library makes its basis by torch.FloatTensor
    radial_basis, cutoff = package.nn.GaussianRBF(4, 5.0), package.nn.CosineCutoff(5.0)
    torch.set_default_dtype(torch.float64)
    network = models.NeuralNetworkPotential(
        package.representation.SchNet(n_atom_basis=8, n_interactions=1, radial_basis=radial_basis, cutoff_fn=cutoff),
        [atomistic.PairwiseDistances()],
        [atomistic.Atomwise(n_in=8, output_key="energy"), atomistic.Forces()],
    )  # fmt: skip
    outputs = [
        task.ModelOutput(name, nn.MSELoss(), weight, {"mae": metrics.MeanAbsoluteError()})
        for name, weight in (("energy", 0.1), ("forces", 0.9))
    ]
    module = task.AtomisticTask(network, outputs, torch.optim.SGD, {"lr": 0.01})
    g = generator()

    def molecule(index: int) -> dict[str, Tensor]:
        size = 3 + index % 3
        pairs = torch.tensor([(i, j) for i in range(size) for j in range(size) if i != j])
        drawn = {name: torch.randn(size, 3, generator=g, dtype=torch.float64) for name in (keys.R, "forces")}
        return {
            **drawn, keys.Z: torch.ones(size, dtype=torch.long), keys.n_atoms: torch.tensor([size]),
            "energy": torch.randn(1, generator=g, dtype=torch.float64), keys.idx_i: pairs[:, 0],
            keys.idx_j: pairs[:, 1], keys.offsets: torch.zeros(len(pairs), 3, dtype=torch.float64),
        }  # fmt: skip

    molecules: Any = [molecule(i) for i in range(NUM_SAMPLES)]
    return module, both(lambda: package.data.AtomsLoader(molecules, batch_size=4))


def careamics() -> Made:
    """Noise2Void of CAREamics on a small U-Net; its batches are lists of (patches, originals, masks)."""
    create = importlib.import_module("careamics.lightning").create_careamics_module
    module = create(
        "n2v", "n2v", "UNet", {"depth": 1, "num_channels_init": 8, "n2v2": False}, "SGD", {"lr": 0.01},
    )  # fmt: skip
    g = generator()
    clean, noisy = (torch.rand(NUM_SAMPLES, 1, 16, 16, generator=g, dtype=torch.float64) for _ in range(2))
    # masks of as many pixels each, as the library draws them
    mask = torch.zeros(NUM_SAMPLES, 1, 16, 16, dtype=torch.float64)
    mask[..., ::4, ::4] = 1
    samples = list(zip(noisy, clean, mask, strict=True))
    return without_randomness(module), both(lambda: DataLoader(samples, batch_size=4))  # pyright: ignore[reportArgumentType]


def neuralforecast() -> Made:
    """N-HiTS on eleven monthly series, with the data module of its package, batches of 4, 4 and 3 series.

    All windows of a series are used, so that nothing is drawn at random.
    """
    pandas, tsdataset = importlib.import_module("pandas"), importlib.import_module("neuralforecast.tsdataset")
    months = pandas.date_range("2020-01-31", periods=36, freq="ME")
    noise = torch.randn(NUM_SAMPLES, 36, generator=generator())
    series = [
        {"unique_id": f"series {i}", "ds": month, "y": float(i + 0.1 * t * i + (t % 12) + noise[i, t])}
        for i in range(NUM_SAMPLES)
        for t, month in enumerate(months)
    ]
    dataset, *_ = tsdataset.TimeSeriesDataset.from_df(pandas.DataFrame(series))
    dataset.temporal = dataset.temporal.double()
    module = importlib.import_module("neuralforecast.models").NHITS(
        h=4, input_size=8, mlp_units=3 * [[16, 16]], windows_batch_size=None, learning_rate=0.01
    )
    module.val_size, module.test_size = 4, 0  # what the package's own `fit` sets
    # unshuffled, as Lightning's validation draws from the random stream that orders the next epoch
    options = {"batch_size": 4, "valid_batch_size": 4, "shuffle_train": False}
    return module, {"datamodule": tsdataset.TimeSeriesDataModule(dataset, **options)}


def pytorch_tabular() -> Made:
    """A category embedding model without BatchNorm and dropout; its batches are dicts."""
    package, config, models = load("pytorch_tabular", "", "config", "models")
    pandas = importlib.import_module("pandas")
    model = package.TabularModel(
        data_config=config.DataConfig(target=["y"], continuous_cols=["a", "b"], categorical_cols=["kind"]),
        model_config=models.CategoryEmbeddingModelConfig(
            task="regression", layers="16-8", batch_norm_continuous_input=False, metrics=["mean_squared_error"]
        ),
        optimizer_config=config.OptimizerConfig(), trainer_config=config.TrainerConfig(batch_size=8), verbose=False,
    )  # fmt: skip
    frame = pandas.DataFrame(torch.randn(42, 3, generator=generator()).numpy(), columns=["a", "b", "y"])
    frame["kind"] = [("red", "green", "blue")[i % 3] for i in range(42)]
    frame["y"] += frame["a"] * 2 + (frame["kind"] == "red")
    data = model.prepare_dataloader(train=frame[:30], validation=frame[30:], seed=1)
    loaders = (data.train_dataloader(), data.val_dataloader())
    # unshuffled, too
    names = ("train_dataloaders", "val_dataloaders")
    return model.prepare_model(data), {
        name: DataLoader(one.dataset, 8) for name, one in zip(names, loaders, strict=True)
    }


CASES: dict[str, Callable[[], Made]] = {
    make.__name__: make
    for make in (
        chemprop, scvi, pytorch_forecasting, gluonts, torchgeo, anomalib, nequip, pyannote, rl4co, terratorch, deeptab,
        schnetpack, careamics, neuralforecast, pytorch_tabular,
    )
}  # fmt: skip

BY_BATCHES = {"pytorch_forecasting": ("val_RMSE",), "terratorch": ("val/Boundary_mIoU",)}
"""Values that a library computes by the batches it is given, so that they depend on how those are cut."""


def case(name: str) -> Case:
    made: dict[str, Any] = {}

    def module() -> Any:
        found, data = CASES[name]()  # which belong together
        made.update(data)
        return found.double()

    def loaders() -> tuple[Any, Any]:
        return made["train_dataloaders"], made.get("val_dataloaders")

    return Case(name, "zoo", module, loaders, differs=BY_BATCHES.get(name, ()), tolerance=TOLERANCE)
