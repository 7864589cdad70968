"""Cutting modules into stages, and where parts, outputs and optimizer state go; `meta` stands for a second device."""

import copy
import pickle
import random
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from stage_modules import DeepNet
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from evener.strategies import ConfigError
from evener.strategies.core.loop_contract import state_to_parameters
from evener.strategies.pipeline.plan import auto_plan, balanced_cut, find_parts, named_plan
from evener.strategies.pipeline.stages import StageOptions, Stages

CPU, META = torch.device("cpu"), torch.device("meta")


class Residual(nn.Sequential):
    """A container whose forward adds its input: it must not be cut inside."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Small(nn.Module):
    """Four blocks between an embedding and a head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Residual(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))
        self.head = nn.Linear(4, 4, bias=False)
        if tied:
            self.head.weight = self.embed.weight


class Wrapper(nn.Module):
    """A module whose only child holds everything, with tensors of its own inside."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Small()
        self.model.register_buffer("mask", torch.ones(3))


LAYER = nn.TransformerEncoderLayer(4, 2, 8)
ENCODER = nn.TransformerEncoder(LAYER, 2, enable_nested_tensor=False)
BLOCKS = ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Small(), BLOCKS),  # not what is inside the blocks
        (nn.Sequential(LAYER, nn.Linear(4, 4)), ["0", "1"]),  # a torch layer with children is one part
        (nn.ModuleDict({"net": ENCODER}), ["net.layers.0", "net.layers.1"]),
        (Wrapper(), ["model", *(f"model.{name}" for name in BLOCKS)]),  # its own tensors are a part, too
    ],
)
def test_parts_are_blocks_and_hold_every_tensor_once(module: nn.Module, expected: list[str]) -> None:
    parts = find_parts(module)
    assert [part.name for part in parts] == expected
    held = [id(tensor) for part in parts for tensor in part.tensors]
    assert sorted(held) == sorted({id(tensor) for tensor in (*module.parameters(), *module.buffers())})


def test_cuts_equal_brute_force() -> None:
    assert balanced_cut([3, 3, 3, 1, 1, 1], [1, 1]) == [2, 4]
    assert balanced_cut([3, 3, 3, 1, 1, 1], [1, 2]) == [1, 5]  # 3 and 9 / 2
    generator = random.Random(0)
    for _ in range(200):
        costs = [generator.randint(1, 9) for _ in range(generator.randint(3, 9))]
        weights = [generator.choice([0.5, 1, 2, 3]) for _ in range(generator.randint(1, 3))]
        cuts = combinations(range(1, len(costs)), len(weights) - 1)
        largest = {
            tuple(b - a for a, b in edges): max(sum(costs[a:b]) / w for (a, b), w in zip(edges, weights, strict=True))
            for edges in ([*pairwise([0, *cut, len(costs)])] for cut in cuts)
        }
        assert largest[tuple(balanced_cut(costs, weights))] == min(largest.values())


def test_optimizer_copies_move_the_cut() -> None:
    module = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4), nn.Linear(4, 8))
    module[:2].requires_grad_(requires_grad=False)
    # frozen: 144 and 80 bytes; then 160 bytes twice (SGD) or four times (Adam)
    assert list(auto_plan(module, 2, optimizer_copies=2).values()) == [0, 0, 1]
    module[1].requires_grad_()
    assert list(auto_plan(module, 2, optimizer_copies=0).values()) == [0, 0, 1]


def test_tied_weights_stay_on_one_stage_and_loose_tensors_go_with_the_part_that_follows() -> None:
    plan = auto_plan(Small(tied=True), 3)
    assert plan["head"] == plan["embed"] == 0
    named = named_plan(nn.Sequential(nn.Linear(2, 2), Wrapper()), 2, ["1.model.embed"])
    assert (named["0"], named["1.model"]) == (0, 0)  # registered before the name
    assert (named["1.model.embed"], named["1.model.head"]) == (1, 1)


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        (["blocks.1", "head"], {"embed": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 1, "blocks.3": 1, "head": 2}),
        # what must be is opened
        (["blocks.1.0"], {"embed": 0, "blocks.0": 0, "blocks.1.0": 1, "blocks.2": 1, "blocks.3": 1, "head": 1}),
        # costs in parameters: embed 16, four blocks of 20, head 16: 56 on each side of the middle
        ("auto", {"embed": 0, "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1, "head": 1}),
    ],
)
def test_plans_by_hand(partition: Any, expected: dict[str, int]) -> None:
    plan = auto_plan(Small(), 2) if partition == "auto" else named_plan(Small(), len(partition) + 1, partition)
    assert dict(plan) == expected


@pytest.mark.parametrize(
    ("num", "partition", "message"),
    [
        (2, ["blocks.9"], r"has no module 'blocks\.9'; the nearest are blocks\.3, blocks\.2"),
        (3, ["head"], r"has 1 names for 3 stages\. Give 2"),
        (3, ["head", "blocks.1"], "in the order of module.named_modules"),
        (2, ["embed"], "leaves stage 0 without parameters"),
    ],
)
def test_names_that_cannot_be_cut_are_refused(num: int, partition: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        named_plan(Small(), num, partition)


class Opaque(nn.Module):
    """May do anything between its children."""

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Body(Opaque):
    """Two embeddings before its layers, as in transformers."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.tokens, self.places = embedding, nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Residual(nn.Linear(4, 4)) for _ in range(4))
        self.norm = nn.LayerNorm(4)


class Tied(Opaque):
    """An encoder and a decoder within a module with a head, all with one embedding."""

    def __init__(self) -> None:
        super().__init__()
        embedding = nn.Embedding(10, 4)
        self.encoder, self.decoder = Body(embedding), Body(embedding)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = embedding.weight


def test_modules_whose_parts_are_all_tied_are_opened_down_to_their_layers_and_no_others() -> None:
    """They were one part, and the user had to name the cut: GPT-2 and T5."""
    plan = auto_plan(nn.ModuleDict({"model": Tied()}), 3)
    stages = {name.removeprefix("model."): stage for name, stage in plan.items()}
    tied = ["encoder.tokens", "encoder.places", "encoder.layers.0", "decoder.tokens", "head"]
    assert [stages[name] for name in tied] == [0] * 5
    chain = [f"encoder.layers.{i}" for i in range(4)] + ["encoder.norm", "decoder.places"]
    chain += [f"decoder.layers.{i}" for i in range(4)] + ["decoder.norm"]
    assert [stages[name] for name in chain] == sorted(stages[name] for name in chain)
    assert stages["decoder.places"] == stages["decoder.layers.0"] > 0
    assert list(auto_plan(nn.Sequential(Body(nn.Embedding(10, 4)), nn.Linear(4, 4)), 2)) == ["0", "1"]


def placed(devices: list[torch.device], **options: Any) -> tuple[DeepNet, Stages]:
    module, layout = DeepNet(), Stages(devices, StageOptions(**options))
    layout.place(module)
    return module, layout


def test_parts_go_to_their_devices_and_outputs_to_the_meeting_device() -> None:
    module, _ = placed([CPU, META], partition=["net.blocks.2"])  # meta is a device, too
    where = {name: p.device for name, p in module.named_parameters()}
    assert {name for name, device in where.items() if device == CPU} == {
        *("net.enter.weight", "net.enter.bias"),
        *(f"net.blocks.{i}.linear.{kind}" for i in range(2) for kind in ("weight", "bias")),
    }
    assert module.device == module(torch.zeros(2, 4)).device == META
    module, layout = placed([META, CPU], output_device="first")
    assert (layout.meeting_device, module.device) == (META, META)


def test_lengths_of_a_packed_sequence_stay_on_the_cpu() -> None:
    # Failed before, on a GPU: they were moved to the stage, and torch refuses such a sequence.
    packed = Stages([CPU, META], StageOptions())._bring(1, [pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])])[0]
    assert (packed.data.is_meta, packed.batch_sizes.tolist()) == (True, [2, 1, 1])


def test_optimizer_state_made_at_the_start_follows_its_parameter() -> None:
    parameter = nn.Parameter(torch.ones(3, device=META))
    optimizer = torch.optim.Adagrad([parameter])  # makes its state when it is made
    optimizer.state[parameter]["sum"] = torch.ones(3)  # on the root device, where Lightning puts it
    state_to_parameters(optimizer)
    assert optimizer.state[parameter]["sum"].device == META
    assert optimizer.state[parameter]["step"].device == CPU


def test_copies_of_a_placed_module_and_of_a_part_compute_what_they_do_in_another_process_too() -> None:
    module, stages = placed([CPU, CPU])  # a callback that averages weights makes a copy when training begins
    x = torch.ones(2, 4)
    before, average, part = module(x), copy.deepcopy(module), copy.deepcopy(module.net.enter)
    assert torch.allclose(pickle.loads(pickle.dumps(part))(x), module.net.enter(x))
    stages.remove()
    assert all(not own._forward_pre_hooks for own in module.modules())
    with torch.no_grad():
        module.net.leave.weight.add_(1.0)
    assert torch.allclose(average(x), before)
    assert not torch.allclose(module(x), before)
