"""Cutting modules into stages."""

import pytest
import torch
from torch import nn

from evener.strategies import ConfigError
from evener.strategies.pipeline._plan import auto_plan, balanced_cut, found_plan, named_plan, plan_rows, verify_manual
from evener.strategies.pipeline.module_parts import Part, find_parts, part_bytes

CPU = torch.device("cpu")


class Residual(nn.Sequential):
    """A container whose forward adds its input: it must not be cut inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Small(nn.Module):
    """Four blocks between an embedding and a head."""

    def __init__(self, tied: bool = False, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width, bias=False)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Residual(nn.Linear(width, width), nn.ReLU()) for _ in range(4))
        self.head = nn.Linear(width, width, bias=False)
        if tied:
            self.head.weight = self.embed.weight


class Wrapper(nn.Module):
    """A module whose only child holds everything, with tensors of its own inside."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Small()
        self.model.register_buffer("mask", torch.ones(3))


LAYER = nn.TransformerEncoderLayer(4, 2, 8)


def names(parts: list[Part]) -> list[str]:
    return [part.name for part in parts]


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Small(), ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]),  # not what is inside the blocks
        (nn.Sequential(LAYER, nn.Linear(4, 4)), ["0", "1"]),  # a torch layer with children is one part
        (
            nn.ModuleDict({"net": nn.TransformerEncoder(LAYER, 2, enable_nested_tensor=False)}),
            ["net.layers.0", "net.layers.1"],
        ),
    ],
)
def test_parts_are_blocks(module: nn.Module, expected: list[str]) -> None:
    assert names(find_parts(module)) == expected


def test_a_lone_child_is_opened_and_its_own_tensors_are_a_part() -> None:
    parts = find_parts(Wrapper())
    assert names(parts)[:3] == ["model", "model.embed", "model.blocks.0"]
    assert [part.loose for part in parts[:3]] == [True, False, False]


def test_parts_hold_every_tensor_once() -> None:
    module = Wrapper()
    held = [tensor for part in find_parts(module) for tensor in part.tensors]
    assert {id(t) for t in held} == {id(t) for t in (*module.parameters(), *module.buffers())}
    assert len(held) == len({id(t) for t in held})


def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Parameter 0\.weight has no shape yet"):
        find_parts(nn.Sequential(nn.LazyLinear(3)))


def test_part_bytes_by_hand() -> None:
    weight, buffer = nn.Parameter(torch.zeros(10)), torch.zeros(3)
    frozen = nn.Parameter(torch.zeros(5), requires_grad=False)
    # 40 bytes: weight, gradient and two moments; 12 and 20 bytes once
    assert part_bytes(Part("x", (weight, buffer, frozen), loose=False), optimizer_copies=2) == 4 * 40 + 12 + 20


@pytest.mark.parametrize(
    ("costs", "num", "expected"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([5, 1, 1, 1, 1], 2, [1, 4]),
        ([1, 2, 3, 4, 5], 3, [3, 1, 1]),
        ([9, 1, 1], 3, [1, 1, 1]),
    ],
)
def test_cut_by_hand(costs: list[int], num: int, expected: list[int]) -> None:
    assert balanced_cut(costs, [1] * num) == expected


def test_auto_plan_by_hand() -> None:
    # costs in parameters: embed 16, four blocks of 20, head 16: 56 on each side of the middle
    plan = auto_plan(Small(), 2)
    assert dict(plan.stage_of) == {"embed": 0, "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1, "head": 1}


def test_tied_weights_stay_on_one_stage() -> None:
    plan = auto_plan(Small(tied=True), 3)
    assert plan.stage_of["head"] == plan.stage_of["embed"] == 0
    named = named_plan(Small(tied=True), 2, ["blocks.2"])
    assert (named.stage_of["head"], named.stage_of["blocks.3"]) == (0, 1)


def test_loose_tensors_go_with_the_part_that_follows() -> None:
    module = nn.Sequential(nn.Linear(2, 2), Wrapper())
    plan = named_plan(module, 2, ["1.model.embed"])
    assert (plan.stage_of["0"], plan.stage_of["1.model"]) == (0, 0)  # registered before the name
    assert (plan.stage_of["1.model.embed"], plan.stage_of["1.model.head"]) == (1, 1)
    auto = auto_plan(Wrapper(), 6)
    assert auto.stage_of["model"] == auto.stage_of["model.embed"] == 0


def test_optimizer_copies_move_the_cut() -> None:
    module = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4), nn.Linear(4, 8))
    module[0].requires_grad_(requires_grad=False)
    # frozen: 144 bytes; then 80 and 160 bytes once (SGD: twice, Adam: four times)
    assert list(auto_plan(module, 2, optimizer_copies=0).stage_of.values()) == [0, 0, 1]
    module[1].requires_grad_(requires_grad=False)
    assert list(auto_plan(module, 2, optimizer_copies=2).stage_of.values()) == [0, 0, 1]


@pytest.mark.parametrize(
    ("num", "partition", "expected"),
    [
        (3, ["blocks.1", "head"], {"embed": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 1, "blocks.3": 1, "head": 2}),
        # what must be is opened
        (2, ["blocks.1.0"], {"embed": 0, "blocks.0": 0, "blocks.1.0": 1, "blocks.2": 1, "blocks.3": 1, "head": 1}),
    ],
)
def test_named_plan_by_hand(num: int, partition: list[str], expected: dict[str, int]) -> None:
    assert dict(named_plan(Small(), num, partition).stage_of) == expected


@pytest.mark.parametrize(
    ("num", "partition", "message"),
    [
        (2, ["blocks.9"], r"has no module 'blocks\.9'; the nearest are blocks\.3, blocks\.2"),
        (3, ["head"], r"has 1 names for 3 stages\. Give 2"),
        (3, ["head", "blocks.1"], r"blocks\.1 is registered before the name listed before it"),
        (2, ["embed"], "leaves stage 0 without parameters"),
    ],
)
def test_names_that_cannot_be_cut_are_refused(num: int, partition: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        named_plan(Small(), num, partition)


def test_manual_placement_that_is_not_finished_is_refused() -> None:
    module = Small()
    module.blocks[1].to("meta")
    verify_manual(Small(), [CPU, CPU])
    with pytest.raises(
        ConfigError, match=r"manual: blocks\.1\.0\.weight on meta, blocks\.1\.0\.bias on meta; the devices .* cpu, cpu"
    ):
        verify_manual(module, [CPU, CPU])


def test_table_by_hand() -> None:
    module = Small(tied=True)
    assert plan_rows(module, named_plan(module, 2, ["blocks.2"]), [CPU, torch.device("cuda:1")]) == [
        ("0", "cpu", "embed, blocks.0-1, head", "56", "224"),
        ("1", "cuda:1", "blocks.2-3", "40", "160"),
    ]


def test_a_placement_by_hand_is_described() -> None:
    module = Small()
    module.blocks[2:].to("meta")
    module.head.to("meta")
    devices = [CPU, torch.device("meta")]
    assert plan_rows(module, found_plan(module, devices), devices) == [
        ("0", "cpu", "embed, blocks.0-1", "56", "224"),
        ("1", "meta", "blocks.2-3, head", "56", "224"),
    ]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.tanh(self.mix(x)))


class Body(nn.Module):
    """Two embeddings, which are added, before its layers, as in transformers."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.tokens, self.places = embedding, nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Tied(nn.Module):
    """An encoder and a decoder within a module with a head, all with one embedding."""

    def __init__(self) -> None:
        super().__init__()
        embedding = nn.Embedding(10, 4)
        self.encoder, self.decoder = Body(embedding), Body(embedding)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.decoder(x) + self.encoder(x))


def test_modules_whose_parts_are_all_tied_are_opened_down_to_their_layers() -> None:
    """They were one part, and the user had to name the cut: GPT-2 and T5."""
    plan = auto_plan(nn.ModuleDict({"model": Tied()}), 3)
    stages = {name.removeprefix("model."): stage for name, stage in plan.stage_of.items()}
    tied = ["encoder.tokens", "encoder.places", "encoder.layers.0", "decoder.tokens", "head"]
    assert [stages[name] for name in tied] == [0] * 5
    chain = [f"encoder.layers.{i}" for i in range(4)] + ["encoder.norm", "decoder.places"]
    chain += [f"decoder.layers.{i}" for i in range(4)] + ["decoder.norm"]
    assert [stages[name] for name in chain] == sorted(stages[name] for name in chain)
    assert stages["decoder.places"] == stages["decoder.layers.0"] > 0


def test_modules_with_enough_parts_are_not_opened() -> None:
    assert list(auto_plan(nn.Sequential(Body(nn.Embedding(10, 4)), nn.Linear(4, 4)), 2).stage_of) == ["0", "1"]
