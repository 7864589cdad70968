"""Sizes of every policy, worked out by hand and by laws that hold for all of them."""

import itertools

import pytest

from evener.strategies.batch.policies import Even, FirstChunk, Policy, Weighted, without_single_samples


@pytest.mark.parametrize(
    ("policy", "num", "expected"),
    [
        (Even(), 10, [3, 3, 2, 2]),
        (Even(), 3, [1, 1, 1, 0]),
        (FirstChunk(1), 10, [1, 3, 3, 3]),
        (FirstChunk(5), 7, [5, 1, 1, 0]),
        (FirstChunk(0), 10, [0, 4, 3, 3]),
        (FirstChunk(2), 7, [2, 2, 2, 1]),
        (Weighted((1, 0, 2, 2)), 10, [2, 0, 4, 4]),
        (Weighted((1, 0, 2, 2)), 3, [1, 0, 1, 1]),
        (Weighted((0.1, 0.2, 0.3, 0.4)), 10, [1, 2, 3, 4]),
    ],
)
def test_sizes_by_hand(policy: Policy, num: int, expected: list[int]) -> None:
    assert policy.sizes(num, 4) == expected
    assert policy.sizes(num, 1) == [num] or isinstance(policy, Weighted)  # whose weights are as many as its parts


def test_every_policy_sums_to_the_batch_for_all_small_cases() -> None:
    for num, parts in itertools.product(range(65), range(1, 5)):
        policies = [Even(), *(FirstChunk(size) for size in range(5))]
        policies += [Weighted(weights) for weights in itertools.product((0, 1, 2.5), repeat=parts) if any(weights)]
        for policy in policies:
            sizes = policy.sizes(num, parts)
            assert (len(sizes), sum(sizes), min(sizes) >= 0) == (parts, num, True)


def test_weighted_parts_are_within_one_sample_of_the_exact_share() -> None:
    weights = (0.3, 1.7, 0, 4.1)
    for num in range(200):
        for size, weight in zip(Weighted(weights).sizes(num, 4), weights, strict=True):
            assert abs(size - num * weight / sum(weights)) < 1


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([2, 1], [3, 0]),
        ([1, 1, 1], [0, 3, 0]),
        ([1, 1, 1, 1], [0, 2, 0, 2]),
        ([4, 4, 1], [5, 4, 0]),
        ([1, 0], [1, 0]),
    ],
)
def test_single_samples_are_merged_into_other_parts(sizes: list[int], expected: list[int]) -> None:
    assert without_single_samples(sizes) == expected
