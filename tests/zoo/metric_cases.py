"""Every metric class of torchmetrics that takes (preds, target) or the like, each as a case of the zoo.

`classes()` finds them; `FAMILIES` says what arguments a module's family of metrics takes, and `ARGUMENTS` what its
constructors must be given. `LEFT_OUT` names every class that has no case, with the reason.
"""

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from zoo import NUM_SAMPLES, TOLERANCE, Case, generator

FEATURES, WIDTH = 4, 6
MODULES = [
    "aggregation", "audio", "classification", "clustering", "detection", "image", "multimodal", "nominal", "regression",
    "retrieval", "segmentation", "shape", "text", "wrappers",
]  # fmt: skip

Batch = dict[str, Any]
Inputs = Callable[[Tensor, Batch], tuple[Any, ...]]
"""(outputs of the network (n, 6), batch) to the arguments of the metric."""


WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "run", "to", "big", "red", "barn"]


def sentence(i: int, shift: int = 0) -> str:
    return " ".join(WORDS[(i * (3 + k) + shift * (k == 2) + k) % len(WORDS)] for k in range(4 + i % 4))


def sample(i: int, images: int = 0) -> Batch:
    g = generator(100 + i)
    made: Batch = {
        "x": torch.randn(FEATURES, generator=g, dtype=torch.float64),
        "binary": torch.randint(0, 2, (), generator=g),
        "label": torch.randint(0, 3, (), generator=g) if i >= 3 else torch.tensor(i),
        "other": torch.randint(0, 3, (), generator=g),
        "labels": torch.randint(0, 2, (3,), generator=g),
        "value": torch.rand((), generator=g, dtype=torch.float64) + 0.1,
        "values": torch.rand(3, generator=g, dtype=torch.float64) + 0.1,
        "group": torch.tensor(i % 2),
        "query": torch.tensor(i // 3),
        "wave": torch.randn(2, 64, generator=g, dtype=torch.float64),
        "mask": torch.randint(0, 3, (8, 8), generator=g),
        "points": torch.randn(5, 3, generator=g, dtype=torch.float64),
        "text": sentence(i),
        "guess": sentence(i, 1),
    }
    if images:
        made["image"] = torch.rand(3, images, images, generator=g, dtype=torch.float64)
    return made


def loader(images: int = 0, num: int = NUM_SAMPLES) -> DataLoader[Any]:
    """Batches of 4, 4 and 3 samples."""
    return DataLoader([sample(i, images) for i in range(num)], batch_size=4)  # pyright: ignore[reportArgumentType]


def moved(out: Tensor, value: Tensor, by: float = 1.0) -> Tensor:
    """A value that the outputs change by as much as they say."""
    return value + out.sum(1).tanh().reshape(-1, *[1] * (value.ndim - 1)) * by * value.flip(2)


def pictures(out: Tensor, batch: Batch) -> tuple[Any, ...]:
    return moved(out, batch["image"], 0.1).clamp(0, 1), batch["image"]


def masks(out: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    mask = batch["mask"]
    return torch.where(out.sum(1)[:, None, None] > 0, mask.flip(1), mask), mask


def boxes(out: Tensor, batch: Batch) -> tuple[Any, ...]:
    """A list of dicts each, one per picture."""
    corner, labels = batch["values"][:, :2] * 10, torch.tensor([1])
    target = torch.cat([corner, corner + 5], 1)
    found = zip(target + out[:, :1].tanh(), out[:, :1].sigmoid(), strict=True)
    preds = [{"boxes": box[None], "scores": score, "labels": labels} for box, score in found]
    return preds, [{"boxes": box[None], "labels": labels} for box in target]


def answers(out: Tensor, batch: Batch) -> tuple[Any, ...]:
    preds = [{"prediction_text": text, "id": str(i)} for i, text in enumerate(batch["guess"])]
    known = [{"answer_start": [0], "text": [text]} for text in batch["text"]]
    return preds, [{"answers": answer, "id": str(i)} for i, answer in enumerate(known)]


TAKEN: dict[str, Inputs] = {
    "value": lambda out, batch: (out[:, 0],),
    "binary": lambda out, batch: (out[:, 0].sigmoid(), batch["binary"]),
    "multiclass": lambda out, batch: (out[:, :3].softmax(1), batch["label"]),
    "multilabel": lambda out, batch: (out[:, :3].sigmoid(), batch["labels"]),
    "regression": lambda out, batch: (out[:, 0].exp(), batch["value"]),
    "regressions": lambda out, batch: (out[:, :3].exp(), batch["values"]),
    "distributions": lambda out, batch: (
        out[:, :3].softmax(1), batch["values"] / batch["values"].sum(1, keepdim=True)
    ),
    "ensemble": lambda out, batch: (out, batch["value"]),
    "retrieval": lambda out, batch: (out[:, 0].sigmoid(), batch["binary"], batch["query"]),
    "fairness": lambda out, batch: (out[:, 0].sigmoid(), batch["binary"], batch["group"]),
    "clusters": lambda out, batch: (out[:, :3].argmax(1), batch["label"]),
    "points": lambda out, batch: (out, batch["group"]),
    "ratings": lambda out, batch: (
        torch.stack([batch["label"], 2 - batch["label"], torch.full_like(batch["label"], 3)], 1),
    ),
    "pictures": pictures,
    "picture": lambda out, batch: pictures(out, batch)[:1],
    "grey": lambda out, batch: tuple(image[:, :1] for image in pictures(out, batch)),
    # of pan-sharpening: the picture, and what it was made from at a lower resolution
    "sharpened": lambda out, batch: (
        pictures(out, batch)[0],
        {"ms": nn.functional.avg_pool2d(pictures(out, batch)[0], 2), "pan": batch["image"].flip(3)},
    ),
    "waves": lambda out, batch: (moved(out, batch["wave"]), batch["wave"]),
    "spectra": lambda out, batch: tuple(
        wave.reshape(len(out), 8, 8, 2) for wave in (moved(out, batch["wave"]), batch["wave"])
    ),
    "one_hot": lambda out, batch: tuple(
        nn.functional.one_hot(mask, 3).movedim(-1, 1) for mask in masks(out, batch)
    ),
    "panoptic": lambda out, batch: tuple(
        torch.stack([mask, torch.zeros_like(mask)], -1) for mask in masks(out, batch)
    ),
    "boxes": boxes,
    "clouds": lambda out, batch: (
        batch["points"] + out.sum(1)[:, None, None] * 0.1 * batch["points"].flip(1), batch["points"]
    ),
    "texts": lambda out, batch: (list(batch["guess"]), list(batch["text"])),
    "translations": lambda out, batch: (list(batch["guess"]), [[text] for text in batch["text"]]),
    "answers": answers,
    "tokens": lambda out, batch: (
        torch.stack([out, out.flip(1)], 1), torch.stack([batch["label"], batch["other"]], 1)
    ),
    "pairs": lambda out, batch: (
        out.unflatten(1, (3, 2)).softmax(1), torch.stack([batch["label"], batch["other"]], 1)
    ),
    "tasks": lambda out, batch: (
        {"c": out[:, :3].softmax(1), "r": out[:, 0].exp()}, {"c": batch["label"], "r": batch["value"]}
    ),
}  # fmt: skip
"""What metrics are updated with, by name."""
OF_IMAGES = ("pictures", "picture", "grey", "sharpened")

FAMILIES: dict[str, str] = {
    "aggregation": "value", "audio": "waves", "clustering": "clusters", "detection": "boxes", "image": "pictures",
    "nominal": "clusters", "regression": "regression", "retrieval": "retrieval", "segmentation": "one_hot",
    "shape": "clouds", "text": "texts", "multimodal": "clouds", "wrappers": "multiclass",
}  # fmt: skip

INPUTS: dict[str, str] = {
    "BinaryFairness": "fairness", "BinaryGroupStatRates": "fairness",
    "ComplexScaleInvariantSignalNoiseRatio": "spectra",
    "ContinuousRankedProbabilityScore": "ensemble", "CosineSimilarity": "regressions", "KLDivergence": "distributions",
    "JensenShannonDivergence": "distributions", "CalinskiHarabaszScore": "points", "DaviesBouldinScore": "points",
    "DunnIndex": "points", "FleissKappa": "ratings", "PanopticQuality": "panoptic",
    "ModifiedPanopticQuality": "panoptic", "TotalVariation": "picture", "PeakSignalNoiseRatioWithBlockedEffect": "grey",
    "QualityWithNoReference": "sharpened",
    "SpatialDistortionIndex": "sharpened", "BLEUScore": "translations", "SacreBLEUScore": "translations",
    "CHRFScore": "translations", "TranslationEditRate": "translations", "SQuAD": "answers", "Perplexity": "tokens",
    "MinMaxMetric": "multiclass", "MultioutputWrapper": "regressions",
}  # fmt: skip

ARGUMENTS: dict[str, Any] = {
    "num_classes": 3, "num_labels": 3, "beta": 0.5, "min_recall": 0.4, "min_precision": 0.4, "min_specificity": 0.4,
    "min_sensitivity": 0.4, "num_groups": 2, "data_range": 1.0, "p": 3, "threshold": 0.5, "things": {0, 1},
    "stuffs": {2}, "mouth_map": [0, 2, 4], "metric_func": None,
}  # fmt: skip

OPTIONS: dict[str, dict[str, Any]] = {
    "MultiScaleStructuralSimilarityIndexMeasure": {"kernel_size": 3, "betas": (0.5, 0.5)},
    "StructuralSimilarityIndexMeasure": {"kernel_size": 5, "data_range": 1.0},
    "UniversalImageQualityIndex": {"kernel_size": (5, 5)},
    "SpatialDistortionIndex": {"window_size": 3}, "QualityWithNoReference": {"window_size": 3},
    "SignalDistortionRatio": {"filter_length": 16},
    "FleissKappa": {"mode": "counts"},
    "SacreBLEUScore": {"n_gram": 2}, "BLEUScore": {"n_gram": 2},
    "ROUGEScore": {"rouge_keys": ("rouge1", "rougeL")},  # rougeLsum wants nltk and data of its own
    "MeanAveragePrecision": {"backend": "pycocotools"},
}  # fmt: skip

IMAGE_SIZE = {"VisualInformationFidelity": 41}
DEFAULT_IMAGE_SIZE = 32

FLOAT32 = {"SpatialCorrelationCoefficient", "MeanIoU"}
"""These cast what they are given to float32 and add in float64."""

WEIGHTS = "it downloads weights"
LEFT_OUT: dict[str, str] = {
    "BaseAggregator": "abstract", "Metric": "abstract", "RetrievalMetric": "abstract", "WrapperMetric": "abstract",
    "MetricInputTransformer": "abstract",
    "DeepImageStructureAndTextureSimilarity": WEIGHTS, "FrechetInceptionDistance": WEIGHTS, "InceptionScore": WEIGHTS,
    "KernelInceptionDistance": WEIGHTS, "LearnedPerceptualImagePatchSimilarity": WEIGHTS,
    "MemorizationInformedFrechetInceptionDistance": WEIGHTS, "PerceptualPathLength": WEIGHTS,
    "CLIPImageQualityAssessment": WEIGHTS, "CLIPScore": WEIGHTS, "BERTScore": WEIGHTS, "InfoLM": WEIGHTS,
    "BootStrapper": "it draws its samples at random",
    "MultitaskWrapper": "it takes dicts: see WRAPPED",
}  # fmt: skip


def accuracy() -> torchmetrics.Metric:
    return torchmetrics.classification.MulticlassAccuracy(3, average="micro")


def of_classes(name: str) -> torchmetrics.Metric:
    return getattr(torchmetrics.classification, f"Multiclass{name}")(3)


def composition() -> torchmetrics.Metric:
    p, r = of_classes("Precision"), of_classes("Recall")
    return 2 * p * r / (p + r + 1e-9)


classification, wrappers = torchmetrics.classification, torchmetrics.wrappers
WRAPPED: dict[str, tuple[Callable[[], Any], str]] = {
    "wrappers.ClasswiseWrapper": (
        lambda: torchmetrics.ClasswiseWrapper(classification.MulticlassRecall(3, average=None)), "multiclass"
    ),
    "wrappers.BinaryTargetTransformer": (
        lambda: wrappers.BinaryTargetTransformer(classification.BinaryAccuracy(), 0), "binary"
    ),
    "wrappers.LambdaInputTransformer": (
        lambda: wrappers.LambdaInputTransformer(classification.BinaryAccuracy(), lambda preds: 1 - preds), "binary"
    ),
    "wrappers.MinMaxMetric": (lambda: torchmetrics.MinMaxMetric(accuracy()), "multiclass"),
    "wrappers.MultioutputWrapper": (
        lambda: torchmetrics.MultioutputWrapper(torchmetrics.MeanAbsoluteError(), 3), "regressions"
    ),
    "wrappers.MultitaskWrapper": (
        lambda: torchmetrics.MultitaskWrapper({"c": accuracy(), "r": torchmetrics.MeanSquaredError()}), "tasks"
    ),
    "wrappers.Running": (lambda: wrappers.Running(accuracy(), 2), "multiclass"),
    "wrappers.RunningMean": (lambda: torchmetrics.RunningMean(2), "value"),
    "wrappers.RunningSum": (lambda: torchmetrics.RunningSum(2), "value"),
    "composition 2pr/(p+r)": (composition, "multiclass"),
    "composition accuracy+1": (lambda: accuracy() + 1.0, "multiclass"),
    "MetricCollection of four": (
        lambda: torchmetrics.MetricCollection([accuracy(), *map(of_classes, ("Precision", "Recall", "AUROC"))]),
        "multiclass",
    ),
}  # fmt: skip


VARIANTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "multiclass AUROC by thresholds": ("classification.MulticlassAUROC", {"thresholds": 5}, "multiclass"),
    "binary PR curve by thresholds": ("classification.BinaryPrecisionRecallCurve", {"thresholds": 5}, "binary"),
    "multiclass samplewise accuracy": (
        "classification.MulticlassStatScores", {"multidim_average": "samplewise", "average": None}, "pairs"
    ),
    "Pearson of 3 outputs": ("regression.PearsonCorrCoef", {"num_outputs": 3}, "regressions"),
    "R2 of 3 outputs": ("regression.R2Score", {"multioutput": "raw_values"}, "regressions"),
    "MSE of 3 outputs": ("regression.MeanSquaredError", {"num_outputs": 3}, "regressions"),
    "NRMSE by range": ("regression.NormalizedRootMeanSquaredError", {"normalization": "range"}, "regression"),
    "NRMSE by std": ("regression.NormalizedRootMeanSquaredError", {"normalization": "std"}, "regression"),
    "PSNR by range": ("image.PeakSignalNoiseRatio", {"data_range": (0.0, 1.0)}, "pictures"),
    "SSIM without range": (
        "image.StructuralSimilarityIndexMeasure", {"data_range": None, "kernel_size": 5}, "pictures"
    ),
    "Dice, global": ("segmentation.DiceScore", {"aggregation_level": "global"}, "one_hot"),
}  # fmt: skip


def classes() -> dict[str, type[torchmetrics.Metric]]:
    """Every metric class that torchmetrics exports, by "module.Name"."""
    found = {}
    for module_name in MODULES:
        module = importlib.import_module(f"torchmetrics.{module_name}")
        for name in sorted(getattr(module, "__all__", dir(module))):
            item = getattr(module, name)
            if issubclass(type(item), type) and issubclass(item, torchmetrics.Metric):  # isclass: aliases on 3.10
                found[f"{module_name}.{name}"] = item
    return found


def is_task_front(item: type) -> bool:
    """Accuracy(task=...): its __new__ gives BinaryAccuracy and the like, which have cases."""
    return issubclass(item, torchmetrics.classification.base._ClassificationTaskWrapper)


def inputs_of(name: str) -> str:
    module, _, short = name.partition(".")
    kinds = [kind for kind in ("binary", "multiclass", "multilabel") if short.lower().startswith(kind)]
    return INPUTS.get(short) or (kinds[0] if module == "classification" else FAMILIES[module])


def build(name: str, **options: Any) -> torchmetrics.Metric:
    """The metric, with what its constructor must be given."""
    module, _, short = name.partition(".")
    item = getattr(importlib.import_module(f"torchmetrics.{module}"), short)
    parameters = inspect.signature(item.__init__).parameters
    needed = [name for name, one in parameters.items() if one.default is one.empty or name == "num_classes"]
    given = {name: ARGUMENTS[name] for name in needed if name in ARGUMENTS}
    return item(**{**given, **OPTIONS.get(short, {}), **options})


def names() -> list[str]:
    """Names of all cases."""
    single = [
        name
        for name, item in classes().items()
        if name.partition(".")[2] not in LEFT_OUT and not is_task_front(item) and not name.startswith("wrappers.")
        and not name.startswith("aggregation.Running") and name != "audio.PermutationInvariantTraining"
    ]  # fmt: skip
    return [*single, *WRAPPED, *VARIANTS, "audio.PermutationInvariantTraining"]


def metric_of(name: str) -> tuple[Callable[[], Any], str]:
    """What makes the metric, and what it takes."""
    if name in WRAPPED:
        return WRAPPED[name]
    if name in VARIANTS:
        base, options, inputs = VARIANTS[name]
        return partial(build, base, **options), inputs
    if name == "audio.PermutationInvariantTraining":
        ratio = torchmetrics.functional.audio.scale_invariant_signal_noise_ratio
        return partial(build, name, metric_func=ratio), "waves"
    return partial(build, name), inputs_of(name)


class Metered(pl.LightningModule):
    """A small network whose outputs metrics are fed with, in training and in validation.

    A metric that gives one number is logged for steps and epochs; of any other all numbers of the epoch.
    """

    def __init__(self, make: Callable[[], Any], inputs: Inputs, images: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.train_metric, self.val_metric = make(), make()
        if isinstance(self.train_metric, torchmetrics.MetricCollection):
            self.val_metric = self.train_metric.clone(prefix="val_")
        self.inputs = inputs
        self.scalar = isinstance(probe(make(), inputs, images), Tensor)

    def count(self, out: Tensor, batch: Batch, stage: str) -> None:
        metric, args = getattr(self, f"{stage}_metric"), self.inputs(out.detach(), batch)
        if isinstance(metric, torchmetrics.MetricCollection):
            metric(*args)
            self.log_dict(metric, on_step=True, on_epoch=True)  # pyright: ignore[reportArgumentType]
        elif self.scalar:
            metric(*args)
            self.log(f"{stage}_metric", metric, on_step=True, on_epoch=True)
        else:
            metric.update(*args)

    def keep(self, stage: str) -> None:
        metric = getattr(self, f"{stage}_metric")
        if not self.scalar and not isinstance(metric, torchmetrics.MetricCollection):
            leaves = [torch.as_tensor(leaf).flatten() for leaf in tree_leaves(metric.compute())]
            self.log_dict({f"{stage}_{i}_{j}": x for i, leaf in enumerate(leaves) for j, x in enumerate(leaf.double())})
            metric.reset()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        out = self.net(batch["x"])
        self.count(out, batch, "train")
        return nn.functional.cross_entropy(out, batch["label"])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.count(self.net(batch["x"]), batch, "val")

    def on_train_epoch_end(self) -> None:
        self.keep("train")

    def on_validation_epoch_end(self) -> None:
        self.keep("val")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def probe(metric: Any, inputs: Inputs, images: int) -> Any:
    """The metric's value for one batch: one number, or anything else as a list of its tensors."""
    batch = next(iter(loader(images)))
    result = metric(*inputs(torch.randn(4, WIDTH, generator=generator(), dtype=torch.float64), batch))
    return result if isinstance(result, Tensor) and result.numel() == 1 else [result]


def tolerance(make: Callable[[], Any], inputs: Inputs, images: int) -> float:
    """1e-10, or 1e-5 for a metric that computes in float32 whatever it is given."""
    metric = make()
    seen = [probe(metric, inputs, images)]
    if isinstance(metric, torchmetrics.Metric):
        seen += list(metric.metric_state.values())
    dtypes = {leaf.dtype for leaf in tree_leaves(seen) if isinstance(leaf, Tensor)}
    return 1e-5 if torch.float32 in dtypes else TOLERANCE


def case(name: str) -> Case:
    make, taken = metric_of(name)
    short = (VARIANTS[name][0] if name in VARIANTS else name).partition(".")[2]
    images = IMAGE_SIZE.get(short, DEFAULT_IMAGE_SIZE) if taken in OF_IMAGES else 0
    allowed = 1e-5 if short in FLOAT32 else tolerance(make, TAKEN[taken], images)
    module, loaders = partial(Metered, make, TAKEN[taken], images), lambda: (loader(images), loader(images))
    return Case(name, "zoo", module, loaders, tolerance=allowed)
