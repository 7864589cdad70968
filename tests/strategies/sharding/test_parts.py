"""Which parts of a module are gathered one by one."""

import pytest
from torch import nn

from evener.strategies import ConfigError
from evener.strategies.sharding.parts import automatic_parts, named_parts


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scales = nn.ParameterList([nn.Parameter(nn.init.ones_(self.body.bias.new_empty(4)))])
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight


def test_tied_parts_batchnorm_lists_of_parameters_and_small_parts_stay_with_the_root() -> None:
    assert automatic_parts(Tied(), ["embed", "body", "norm", "scales", "head"]) == ["body"]
    module = nn.Sequential(nn.Linear(100, 100), nn.Linear(1, 1), nn.Linear(100, 10))  # below a hundredth
    assert automatic_parts(module, ["0", "1", "2"]) == ["0", "2"]


def test_named_parts_come_before_the_parts_that_they_are_in() -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    assert named_parts(module, ["0", "0.1"]) == ["0.1", "0"]


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["boddy"], r"fsdp: shard: Tied has no module 'boddy'; the nearest are body"),
        (["head"], r"head shares the parameter embed.weight with the rest of the module"),
    ],
)
def test_names_that_cannot_be_parts_are_refused(names: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        named_parts(Tied(), names)
