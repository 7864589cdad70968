"""The solver against brute force, and the controller on devices whose speed is known."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from evener.strategies.balance.controller import BalanceController, largest_time, solve


def test_no_distribution_is_better_than_the_solution() -> None:
    rng = random.Random(0)
    for _ in range(200):
        costs = [(rng.choice([0, 0, 1, 5]), rng.choice([0.5, 1, 2, 3, 7])) for _ in range(rng.randint(1, 3))]
        num = rng.randint(len(costs), 12)
        every = [sizes for sizes in itertools.product(range(1, num + 1), repeat=len(costs)) if sum(sizes) == num]
        found = solve(num, costs)
        assert tuple(found) in every
        assert largest_time(found, costs) == min(largest_time(other, costs) for other in every)


Seconds = Callable[[list[int]], list[float]]
"""What each device takes for its samples."""


def per_sample(*costs: float) -> Seconds:
    return lambda sizes: [size * cost for size, cost in zip(sizes, costs, strict=True)]


def measure(controller: BalanceController, seconds: Seconds, num_samples: int, steps: int) -> list[list[int]]:
    """The sizes of each step, and those of the next."""
    history: list[list[int]] = []
    for _ in range(steps):
        sizes = controller.sizes(num_samples, controller.num_devices)
        controller.observe(sizes, seconds(sizes))
        history.append(sizes)
    return [*history, controller.sizes(num_samples, controller.num_devices)]


def controller_of(num_devices: int, **options: Any) -> BalanceController:
    controller = BalanceController(**options)
    controller.begin(num_devices)
    return controller


def test_shares_are_even_until_something_was_measured_and_ideal_after() -> None:
    controller = controller_of(3, warmup=2)
    history = measure(controller, per_sample(3.0, 1.0, 1.0), 70, 20)
    # 2 to warm up, 6 that are measured; then the first device loses half of its 24, and 8 steps later the rest
    assert history == [[24, 23, 23]] * 8 + [[12, 29, 29]] * 8 + [[10, 30, 30]] * 5
    assert controller.shares == pytest.approx([1 / 7, 3 / 7, 3 / 7])
    assert controller.efficiency == pytest.approx(1.0)
    checkpoint: dict[str, Any] = {}
    controller.save(checkpoint)
    for num, expected in ((3, [10, 30, 30]), (2, [35, 35])):
        resumed = BalanceController()
        resumed.load(checkpoint)
        resumed.begin(num)
        assert resumed.sizes(70, num) == expected


def test_a_gain_below_the_hysteresis_changes_nothing() -> None:
    # even: the largest time is 52; best: 49 and 51 samples, 51.0; the gain of 1.9% is below 2%
    seconds = per_sample(1.04, 1.0)
    assert measure(controller_of(2, warmup=0), seconds, 100, 6)[-1] == [50, 50]
    assert measure(controller_of(2, warmup=0, hysteresis=0.001), seconds, 100, 6)[-1] == [49, 51]


def test_one_slow_step_and_ragged_batches_change_nothing() -> None:
    controller = controller_of(2, warmup=0)
    measure(controller, per_sample(1.0, 1.0), 100, 5)
    assert not controller.observe([50, 50], [500.0, 50.0])
    for _ in range(20):
        controller.observe([1, 1], [10.0, 1.0])
    assert controller.sizes(100, 2) == [50, 50]


def test_times_that_scatter_change_nothing_by_accident() -> None:
    # relative to the first's, the other's times are 1/2, 3/4, 3/4, 3/4 and 4/5
    controller = controller_of(2, warmup=0)
    for slow, fast in [(1.0, 0.5), (2.0, 1.5), (3.0, 2.25), (4.0, 3.0), (5.0, 4.0)]:
        assert not controller.observe([50, 50], [slow, fast])
    steady = controller_of(2, warmup=0)
    assert [steady.observe([50, 50], [3.0, 2.25]) for _ in range(6)] == [False] * 5 + [True]


@pytest.mark.parametrize(("cost", "expected"), [(1.0, [32, 32]), (3.0, [16, 48])])
def test_what_all_devices_share_changes_nothing_and_a_difference_is_found_all_the_same(
    cost: float, expected: list[int]
) -> None:
    """Other programs make every step of both devices up to ten times as slow."""
    noise = random.Random(0)

    def seconds(sizes: list[int]) -> list[float]:
        load = noise.uniform(1, 10)
        return per_sample(cost * load, load)(sizes)

    assert measure(controller_of(2), seconds, 64, 100)[-1] == expected


def test_a_load_that_comes_between_two_sizes_is_no_fixed_time() -> None:
    # 3 and 1 s per sample; the first gets 16 of 64 by and by. From its second size on everything takes five times
    # as long, which by a line through both sizes would mean that all its time is fixed
    def seconds(sizes: list[int]) -> list[float]:
        load = 1 if sizes == [32, 32] else 5
        return per_sample(3.0 * load, load)(sizes)

    assert measure(controller_of(2, warmup=0), seconds, 64, 40)[-1] == [16, 48]


@pytest.mark.parametrize("seed", range(3))
def test_equal_devices_under_bursts_keep_equal_shares(seed: int) -> None:
    """Other programs take turns of 4 ms: a chunk of 5 ms is interrupted by up to seven of them, or not at all."""
    noise = random.Random(seed)

    def seconds(sizes: list[int]) -> list[float]:
        return [size * 0.00016 + 0.004 * sum(noise.random() < 0.3 for _ in range(7)) for size in sizes]

    for sizes in measure(controller_of(2), seconds, 64, 200):
        assert abs(sizes[0] - 32) <= 4


def test_equal_devices_whose_time_is_mostly_fixed_keep_even_shares() -> None:
    """Before what is fixed was known, whoever had fewer samples looked slower per sample, and lost them all."""
    noise = random.Random(0)
    controller = controller_of(2)

    def seconds(sizes: list[int]) -> list[float]:  # 20 ms for any chunk, 0.1 ms per sample, a tenth of noise
        return [(0.02 + 0.0001 * size) * noise.uniform(0.9, 1.1) if size else 0.0 for size in sizes]

    assert min(measure(controller, seconds, 64, 400)[-1]) >= 16
    assert controller.efficiency > 0.85
