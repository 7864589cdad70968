"""Device blocks, against tables worked out by hand."""

import pytest

from evener.strategies import ConfigError
from evener.strategies.distributed.device_blocks import num_processes, own_devices


@pytest.mark.parametrize(
    ("num_devices", "per_process", "expected"),
    [(8, 2, 4), (8, 8, 1), (8, 1, 8), (4, 2, 2), (6, 3, 2), (1, 1, 1)],
)
def test_num_processes(num_devices: int, per_process: int, expected: int) -> None:
    assert num_processes(num_devices, per_process) == expected


@pytest.mark.parametrize(
    ("num_devices", "per_process", "blocks"),
    [
        (8, 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (8, 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (6, 3, [[0, 1, 2], [3, 4, 5]]),
        (3, 1, [[0], [1], [2]]),
        (2, 2, [[0, 1]]),
    ],
)
def test_blocks_cover_the_devices_in_order(num_devices: int, per_process: int, blocks: list[list[int]]) -> None:
    ranks = range(num_processes(num_devices, per_process))
    assert [own_devices(range(num_devices), rank, per_process) for rank in ranks] == blocks


def test_two_nodes_of_four_devices_by_hand() -> None:
    # global rank = node · 2 + local rank; every node counts its own devices from 0
    devices = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    table = {(node, local): own_devices(devices, local, 2) for node in range(2) for local in range(2)}
    assert table == {
        (0, 0): ["cuda:0", "cuda:1"],
        (0, 1): ["cuda:2", "cuda:3"],
        (1, 0): ["cuda:0", "cuda:1"],
        (1, 1): ["cuda:2", "cuda:3"],
    }


def test_indivisible_counts_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="7 devices don't divide into processes of 2 devices"):
        num_processes(7, 2)
    with pytest.raises(ConfigError, match="1 devices don't divide into processes of 2 devices"):
        num_processes(1, 2)
