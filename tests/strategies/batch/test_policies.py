"""Sizes of every policy, worked out by hand and by laws that hold for all of them."""

import itertools

import pytest

from evener.strategies.batch.policies import Even, FirstChunk, Policy, Weighted


@pytest.mark.parametrize(
    ("policy", "num", "expected"),
    [
        (Even(), 10, [3, 3, 2, 2]),
        (Even(), 3, [1, 1, 1, 0]),
        (FirstChunk(1), 10, [1, 3, 3, 3]),
        (FirstChunk(5), 7, [5, 1, 1, 0]),
        (FirstChunk(0), 10, [0, 4, 3, 3]),
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
            if isinstance(policy, Weighted):
                exact = [num * weight / sum(policy.weights) for weight in policy.weights]
                assert all(abs(size - share) < 1 for size, share in zip(sizes, exact, strict=True))
