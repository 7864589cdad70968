"""Models of transformers, torchvision, timm and torch_geometric, made small from their configurations.

No weights are read. Dropout is 0 everywhere. Each module trains on what its library's users give it: dicts of token
ids, lists of pictures and of targets, batches of graphs.
"""

import importlib
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from zoo import NUM_SAMPLES, TOLERANCE, Case, generator

LENGTH, VOCABULARY = 6, 20
Batch = Any


class Trained(pl.LightningModule):
    """A model, its loss of a batch, and what else the loss's function wants logged.

    Args:
        model: the model of another project.
        loss: (model, batch) to the loss and more values to log.
        size: number of samples of a batch; Lightning counts them where it can.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., tuple[Tensor, dict[str, Any]]], size: Any = None) -> None:
        super().__init__()
        self.model, self.loss, self.size = model, loss, size

    def step(self, batch: Batch, stage: str) -> Tensor:
        loss, more = self.loss(self.model, batch)
        size, own = self.size(batch) if self.size else None, {"on_step": False, "on_epoch": True}
        self.log(f"{stage}_loss", loss, on_step=stage == "train", on_epoch=True, batch_size=size)
        self.log_dict({f"{stage}_{name}": value for name, value in more.items()}, batch_size=size, **own)
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.step(batch, "train")

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.step(batch, "val")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Weighted(Trained):
    """Returns the weight of its loss, and logs with it."""

    def step(self, batch: Batch, stage: str) -> Any:
        loss, more = self.loss(self.model, batch)
        self.log(f"{stage}_loss", loss, on_step=False, on_epoch=True, batch_size=int(more["loss_weight"]))
        return {"loss": loss, **more}


# transformers


def text(i: int, length: int = LENGTH) -> dict[str, Tensor]:
    g = generator(i)
    ids = torch.randint(3, VOCABULARY, (length,), generator=g)
    mask = torch.ones(length, dtype=torch.long)
    mask[length - i % 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(i % 3)}


def texts(num: int = NUM_SAMPLES) -> DataLoader[Any]:
    return DataLoader([text(i) for i in range(num)], batch_size=4)  # pyright: ignore[reportArgumentType]


def encoded_texts(num: int = NUM_SAMPLES) -> DataLoader[Any]:
    """As a tokenizer's data collator gives them: a BatchEncoding, padded to the longest of the batch."""
    encoding = importlib.import_module("transformers").BatchEncoding

    def collate(samples: list[dict[str, Tensor]]) -> Any:
        longest = max(int(sample["attention_mask"].sum()) for sample in samples)
        rows = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
        return encoding({key: rows[key] if key == "labels" else rows[key][:, :longest] for key in rows})

    return DataLoader([text(i) for i in range(num)], batch_size=4, collate_fn=collate)  # pyright: ignore


SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": 16, "num_labels": 3, "attn_implementation": "eager",
}  # fmt: skip


def hugging(family: str, task: str, **options: Any) -> Any:
    package = importlib.import_module("transformers")
    return getattr(package, family + task)(getattr(package, f"{family}Config")(**options)).double().train()


OF_PICTURES = {key: value for key, value in SMALL.items() if key not in ("vocab_size", "max_position_embeddings")}
CAUSAL = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"}
bert = partial(hugging, "Bert", "ForSequenceClassification", **SMALL)
vit = partial(hugging, "ViT", "ForImageClassification", image_size=16, patch_size=8, **OF_PICTURES)
llama = partial(hugging, "Llama", "ForCausalLM", **CAUSAL)
mixtral = partial(hugging, "Mixtral", "ForCausalLM", **CAUSAL, **EXPERTS)
t5 = partial(
    hugging, "T5", "ForConditionalGeneration", vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2,
    num_heads=2, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
)  # fmt: skip


def with_states(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    """Hidden states and attentions are part of the loss; their numbers are logged."""
    out = model(**batch, output_hidden_states=True, output_attentions=True)
    extra = torch.stack([state.square().mean((1, 2)) for state in out.hidden_states]).mean(1).sum()
    extra = extra + torch.stack([a[..., 0].mean((1, 2)) for a in out.attentions]).mean(1).sum()
    return out.loss + 0.1 * extra, {"states": float(len(out.hidden_states)), "maps": float(len(out.attentions))}


def own_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    return model(**batch).loss, {}


def through_config(model: Any, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    """`output_hidden_states` as the model's configuration says."""
    out = model(**batch)
    return out.loss + 0.1 * out.hidden_states[1].square().mean(), {"states": float(len(out.hidden_states))}


def gpt2(checkpointed: bool = False) -> nn.Module:
    model = hugging(
        "GPT2", "LMHeadModel", vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    assert model.lm_head.weight is model.transformer.wte.weight
    if checkpointed:
        model.gradient_checkpointing_enable()
    return model


def next_word(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    """All tokens count, so that every sample has as many; the library's own loss is in float32."""
    ids = batch["input_ids"]
    options = {"labels": ids} if model.config.is_encoder_decoder else {}  # pyright: ignore
    logits = model(input_ids=ids, **options).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), {}


def next_word_by_the_model(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    return model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss, {}


def next_word_masked(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    """A mean over the tokens that are no padding: their number is the loss's weight."""
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
    return loss, {"loss_weight": (labels[:, 1:] != -100).sum()}


def pictures(num: int = NUM_SAMPLES, side: int = 16) -> DataLoader[Any]:
    g = generator(5)
    images = [torch.rand(3, side, side, generator=g, dtype=torch.float64) for _ in range(num)]
    rows = [{"pixel_values": image, "labels": torch.tensor(i % 3)} for i, image in enumerate(images)]
    return DataLoader(rows, batch_size=4)  # pyright: ignore[reportArgumentType]


# torchvision and timm


def classified(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    return nn.functional.cross_entropy(model(batch["pixel_values"]), batch["labels"]), {}


def timm_model(name: str, **options: Any) -> nn.Module:
    return without_randomness(
        importlib.import_module("timm").create_model(name, pretrained=False, num_classes=3, **options).double()
    )


def shuffling() -> nn.Module:
    """ShuffleNet: channels that are split, shuffled and joined."""
    net = importlib.import_module("torchvision.models").ShuffleNetV2([1, 1, 1], [8, 8, 16, 32, 32], num_classes=3)
    return without_randomness(net.double())


def swin() -> nn.Module:
    options = {"patch_size": [4, 4], "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": [2, 2]}
    make = importlib.import_module("torchvision.models").SwinTransformer
    return without_randomness(make(**options, stochastic_depth_prob=0.0, num_classes=3).double())


class Backbone(nn.Module):
    """Features as torchvision's segmentation models take them: a dict of the last and of an earlier layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        early = self.first(x).relu()
        return {"out": self.second(early).relu(), "aux": early}


def segmenter(name: str) -> nn.Module:
    parts = importlib.import_module("torchvision.models.segmentation")
    aux = parts.fcn.FCNHead(8, 2)
    if name == "fcn":
        return without_randomness(parts.FCN(Backbone(), parts.fcn.FCNHead(8, 2), aux).double())
    head = parts.deeplabv3.DeepLabHead(8, 2, atrous_rates=[1, 2])
    return without_randomness(parts.DeepLabV3(Backbone(), head, aux).double())


def without_randomness(model: nn.Module) -> nn.Module:
    for name, child in list(model.named_modules()):
        if isinstance(child, nn.Dropout):
            child.p = 0.0
        if isinstance(child, nn.BatchNorm2d):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, nn.GroupNorm(1, child.num_features).double())
    return model


def segmented(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    out = model(batch["pixel_values"])
    target = (batch["pixel_values"][:, 0] > 0.5).long()
    losses = [nn.functional.cross_entropy(each, target) for each in out.values()]
    return losses[0] + 0.4 * sum(losses[1:]), {"outputs": float(len(losses))}


def picture_with_boxes(i: int, varying: bool = False, num: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """A picture with `num` boxes; 0: with one to three."""
    g = generator(50 + i)
    num, side = num or (1, 2, 2, 3)[i % 4], 64 + (8 * (i % 2) if varying else 0)
    corner = torch.rand(num, 2, generator=g, dtype=torch.float64) * 30
    boxes = torch.cat([corner, corner + 8 + 16 * torch.rand(num, 2, generator=g, dtype=torch.float64)], 1)
    labels = torch.randint(1, 3, (num,), generator=g)
    return torch.rand(3, side, side, generator=g, dtype=torch.float64), {"boxes": boxes, "labels": labels}


def with_boxes(varying: bool = False, as_lists: bool = False, num: int = 0, batch_size: int = 4) -> DataLoader[Any]:
    """Pictures and boxes. Trap: with as many boxes per picture as pictures, or as channels, sizes tell nothing."""

    def collate(samples: list[Any]) -> Any:
        unzipped = tuple(zip(*samples, strict=True))  # torchvision's own collate function for detection
        return dict(zip(("images", "targets"), map(list, unzipped), strict=True)) if as_lists else unzipped

    rows = [picture_with_boxes(i, varying, num) for i in range(NUM_SAMPLES)]
    return DataLoader(rows, batch_size=batch_size, collate_fn=collate)  # pyright: ignore


def detector(name: str) -> nn.Module:
    """A detector on a tiny backbone; its sampling of anchors takes all, so that nothing is drawn at random."""
    detection = importlib.import_module("torchvision.models.detection")
    anchors = importlib.import_module("torchvision.models.detection.anchor_utils")
    width = 32 if name == "fcos" else 8
    backbone: Any = nn.Sequential(nn.Conv2d(3, width, 3, 8, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 1, 1))
    backbone.out_channels = width
    made = anchors.AnchorGenerator(sizes=((16, 24),), aspect_ratios=((1.0,),))
    small = {"min_size": 64, "max_size": 128}
    if name == "retinanet":
        return detection.RetinaNet(backbone, num_classes=3, anchor_generator=made, **small).double()
    if name == "fcos":
        single = anchors.AnchorGenerator(sizes=((8,),), aspect_ratios=((1.0,),))
        return detection.FCOS(backbone, num_classes=3, anchor_generator=single, **small).double()
    pool = importlib.import_module("torchvision.ops").MultiScaleRoIAlign(["0"], 3, 2)
    return detection.FasterRCNN(
        backbone, num_classes=3, rpn_anchor_generator=made, box_roi_pool=pool, rpn_batch_size_per_image=1000,
        box_batch_size_per_image=1000, **small,
    ).double()  # fmt: skip


class Detecting(Trained):
    """In train mode a detector gives losses, in eval mode boxes.

    SGD, because biases before a GroupNorm have a gradient of rounding errors, which Adam would make large.
    """

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, _ = split_up(batch)
        found = self.model(list(images))
        self.log("val_found", float(sum(len(one["boxes"]) for one in found)), batch_size=len(images), reduce_fx="sum")


def split_up(batch: Batch) -> tuple[Any, Any]:
    return (batch["images"], batch["targets"]) if isinstance(batch, dict) else batch


def detected(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    """RetinaNet's losses are means over pictures."""
    images, targets = split_up(batch)
    losses = model(list(images), list(targets))
    return sum(losses.values(), torch.zeros(())), {name: value.detach() for name, value in losses.items()}


def detected_one_by_one(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    """The others' are means over the anchors of a whole batch, which are no means over pictures; here they are."""
    pairs = list(zip(*split_up(batch), strict=True))
    return torch.stack([detected(model, ([image], [target]))[0] for image, target in pairs]).mean(), {}


# torch_geometric


def graph(i: int) -> Any:
    data = importlib.import_module("torch_geometric.data")
    g = generator(70 + i)
    nodes = 3 + i % 3
    ring = torch.arange(nodes)
    return data.Data(
        x=torch.randn(nodes, 4, generator=g, dtype=torch.float64), edge_index=torch.stack([ring, ring.roll(1)]),
        y=torch.tensor([i % 3]),
    )  # fmt: skip


def graphs(kind: str = "DataLoader") -> Any:
    """By torch_geometric's DataLoader, or its DataListLoader, made for its own DataParallel."""
    make = getattr(importlib.import_module("torch_geometric.loader"), kind)
    return make([graph(i) for i in range(NUM_SAMPLES)], batch_size=4)


def pairs_of_graphs() -> Any:
    """A batch of one Batch and a tensor, as two datasets zipped give."""
    batch = importlib.import_module("torch_geometric.data").Batch
    rows = [(graph(i), torch.tensor(float(i))) for i in range(NUM_SAMPLES)]

    def collate(samples: list[Any]) -> Any:
        return batch.from_data_list([g for g, _ in samples]), torch.stack([t for _, t in samples])

    return DataLoader(rows, batch_size=4, collate_fn=collate)  # pyright: ignore[reportArgumentType]


def sampled_nodes() -> Any:
    """Minibatches of the nodes of one big graph, by a loader that is a torch DataLoader of indices."""
    data = importlib.import_module("torch_geometric.data")
    loader = importlib.import_module("torch_geometric.loader")
    g = generator(9)
    nodes = 12
    ring = torch.arange(nodes)
    edges = torch.stack([torch.cat([ring, ring]), torch.cat([ring.roll(1), ring.roll(3)])])
    big = data.Data(x=torch.randn(nodes, 4, generator=g, dtype=torch.float64), edge_index=edges, y=ring % 3)
    clusters = [big.subgraph(part) for part in ring.split(4)]
    return loader.DataLoader(clusters, batch_size=1)


class GraphNet(nn.Module):
    """Two graph convolutions, a pooling by graph, and a head."""

    def __init__(self) -> None:
        super().__init__()
        geometric = importlib.import_module("torch_geometric.nn")
        self.first, self.second = geometric.GCNConv(4, 8), geometric.GINConv(nn.Linear(8, 8))
        self.pool, self.head = geometric.global_mean_pool, nn.Linear(8, 3)

    def forward(self, data: Any) -> Tensor:
        out = self.first(data.x, data.edge_index).tanh()
        out = self.second(out, data.edge_index).tanh()
        return self.head(self.pool(out, data.batch))


def graph_loss(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
    return nn.functional.cross_entropy(model(batch), batch.y), {"nodes_per_graph": batch.num_nodes / batch.num_graphs}


def graph_pair_loss(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
    data, values = batch
    return (nn.functional.cross_entropy(model(data), data.y, reduction="none") * (1 + 0.1 * values)).mean(), {}


def graph_list_loss(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
    data = importlib.import_module("torch_geometric.data").Batch.from_data_list(batch)
    return graph_loss(model, data)


def node_loss(model: Any, batch: Any) -> tuple[Tensor, dict[str, Any]]:
    out = model.head(model.first(batch.x, batch.edge_index).tanh())
    return nn.functional.cross_entropy(out, batch.y), {}


def _case(
    make: Any, loss: Any, data: Any, kind: type[Trained] = Trained, size: Any = None, tolerance: float = TOLERANCE
) -> Any:
    return lambda: kind(make(), loss, size), lambda: (data(), data()), tolerance


CASES: dict[str, tuple[Callable[[], Trained], Callable[[], Any], float]] = {
    "transformers: BERT": _case(bert, own_loss, texts),
    "transformers: BERT, BatchEncoding padded by batch": _case(bert, own_loss, encoded_texts),
    "transformers: BERT, hidden states and attentions": _case(bert, with_states, texts),
    "transformers: BERT, hidden states by its config": _case(
        partial(bert, output_hidden_states=True), through_config, texts
    ),
    "transformers: GPT-2, tied": _case(gpt2, next_word, texts),
    "transformers: GPT-2, tied and checkpointed": _case(partial(gpt2, True), next_word, texts),
    "transformers: GPT-2, its own loss": _case(gpt2, next_word_by_the_model, texts, tolerance=1e-5),
    "transformers: GPT-2, loss_weight of tokens": _case(gpt2, next_word_masked, texts, kind=Weighted, tolerance=1e-5),
    "transformers: T5": _case(t5, next_word, texts, tolerance=1e-5),  # its norms compute in float32
    "transformers: ViT": _case(vit, own_loss, pictures),
    "transformers: Llama": _case(llama, next_word, texts, tolerance=1e-5),
    "transformers: Mixtral, two experts": _case(mixtral, next_word, texts, tolerance=1e-5),
    "timm: ViT": _case(partial(timm_model, "test_vit", img_size=32), classified, partial(pictures, side=32)),
    "timm: ResNet with GroupNorm": _case(partial(timm_model, "test_resnet"), classified, partial(pictures, side=32)),
    "torchvision: ShuffleNet with GroupNorm": _case(shuffling, classified, partial(pictures, side=32)),
    "torchvision: Swin": _case(swin, classified, partial(pictures, side=32)),
    "torchvision: FCN segmentation": _case(partial(segmenter, "fcn"), segmented, partial(pictures, side=32)),
    "torchvision: DeepLabV3 segmentation": _case(partial(segmenter, "deeplab"), segmented, partial(pictures, side=32)),
    **{
        f"torchvision: {name}, {title}": _case(
            partial(detector, name), detected if name == "retinanet" else detected_one_by_one,
            partial(with_boxes, **how), kind=Detecting, size=lambda batch: len(split_up(batch)[0]),
        )
        for name in ("retinanet", "fcos", "faster_rcnn")
        for title, how in (
            ("tuple(zip(*batch))", {}),
            ("pictures of several sizes", {"varying": True}),
            ("dict of lists", {"as_lists": True}),
            ("3 boxes in each of 3 pictures", {"num": 3, "batch_size": 3}),
            ("dict of lists, 3 boxes in each of 3 pictures", {"num": 3, "batch_size": 3, "as_lists": True}),
        )
    },
    "torch_geometric: Batch": _case(GraphNet, graph_loss, graphs, size=attrgetter("num_graphs")),
    "torch_geometric: Batch, batch_size not given": _case(GraphNet, graph_loss, graphs),
    "torch_geometric: (Batch, tensor)": _case(GraphNet, graph_pair_loss, pairs_of_graphs),
    "torch_geometric: DataListLoader": _case(GraphNet, graph_list_loss, partial(graphs, "DataListLoader"), size=len),
    "torch_geometric: nodes of subgraphs": _case(GraphNet, node_loss, sampled_nodes),
}  # fmt: skip


def case(name: str) -> Case:
    module, loaders, allowed = CASES[name]
    return Case(name, "zoo", module, loaders, tolerance=allowed)
