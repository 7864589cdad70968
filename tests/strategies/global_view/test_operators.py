"""torch's operators on tensors of which each rank holds some rows, compared with the same on plain ones.

Operators and inputs are those by which torch tests itself (`op_db`). A few run always, all of them with `-m slow`.
"""

import random
import sys
import unittest
import warnings
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_ranks
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from evener.strategies.ranks.global_view import view  # noqa: F401  # registers the rules
from evener.strategies.ranks.global_view.rows import Rows, gathered, rows_of

SOME = ["add", "mean", "var", "corrcoef", "roll", "sort", "cumsum", "matmul", "index_select", "masked_select", "short",
        "squeeze", "split_with_sizes", "split", "bernoulli", "nn.functional.embedding",
        "nn.functional.cross_entropy", "nn.functional.conv2d", "nn.functional.batch_norm", "nn.functional.dropout",
        "nn.functional.linear_cross_entropy", "nn.functional.ctc_loss", "scatter_add", "view", "unfold",
        "linalg.vector_norm"]  # fmt: skip
"""Operators of every run; `roll` and `linear_cross_entropy` (`torch.mul(rows, y, out=z)`) were wrong in silence, and
`corrcoef` squeezes a tensor of which a rank may have one row."""

UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
"""Whose elements are anything."""
RAISE = ("tensor_split", "resize_", "resize_as_")
"""Which raise: by indices in a tensor, which a kernel reads from memory, and by another size of the same memory."""


def differing(names: Sequence[str], num: int, size: int) -> tuple[list[str], int]:
    """Compare `num` inputs of each operator, of all without `names`; what differs, and how many were compared."""
    warnings.simplefilter("ignore")
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # pyright: ignore
    from torch.testing._internal.common_methods_invocations import op_db

    torch.distributed.init_process_group("gloo")
    ranks = torch.distributed.get_rank(), size
    found, compared = [], 0
    for op in op_db:
        if (names and op.name not in names) or torch.float64 not in op.dtypes or op.name in UNDEFINED:
            continue
        for i, sample in enumerate(_samples(op, num)):
            if not any(type(rows_of(one.detach(), *ranks)) is Rows for one in _tensors(sample)):
                continue
            try:
                expected = _computed(op, sample, None)
            except Exception:  # noqa: BLE001  # in-place operations of leaves, and the like
                continue
            compared += 1
            try:
                why = "" if _are_close(_computed(op, sample, ranks), expected) else "differs"
            except Exception as exc:  # noqa: BLE001  # a difference, too
                why = f"raises {type(exc).__name__}: {str(exc)[:100]}"
            if why and not (why.startswith("raises") and op.name in RAISE):
                found.append(f"{op.name} {op.variant_test_name} {i} {why}")
    torch.distributed.destroy_process_group()
    return found, compared


def _samples(op: Any, num: int) -> Iterator[Any]:
    for i, sample in enumerate(op.sample_inputs("cpu", torch.float64, requires_grad=op.supports_autograd)):
        if i == num:
            return
        yield sample


def _tensors(sample: Any) -> list[Tensor]:
    return [one for one in tree_flatten((sample.input, sample.args, sample.kwargs))[0] if isinstance(one, Tensor)]


def _computed(op: Any, sample: Any, ranks: tuple[int, int] | None) -> list[Any]:
    """What an operator returns, and the gradients of numbers that its inputs are multiplied by."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # whose stream some operators draw from
    factors: list[Tensor] = []

    def given(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        value = one.detach().clone()
        value = value if ranks is None else rows_of(value, *ranks)
        if one.requires_grad and one.is_floating_point():
            factors.append(torch.ones((), dtype=one.dtype, requires_grad=True))
            return value * factors[-1]
        return value

    returned = op(*tree_map(given, (sample.input, *sample.args)), **tree_map(given, sample.kwargs))
    outputs = [one for one in tree_flatten(returned)[0] if isinstance(one, Tensor)]
    losses = [(one.abs() if one.is_complex() else one).double().pow(2).sum() for one in outputs if one.requires_grad]
    if losses and factors:
        outputs += torch.autograd.grad(sum(losses), factors, allow_unused=True)  # pyright: ignore
    return [None if one is None else gathered(one.detach()) for one in outputs]


def _are_close(found: list[Any], expected: list[Any]) -> bool:
    if len(found) != len(expected):
        return False
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None:
            if one is not other:
                return False
            continue
        a, b = (value if value.layout is torch.strided else value.to_dense() for value in (one, other))
        limit = 1e-9 if a.dtype in (torch.float64, torch.complex128) else 1e-4
        if a.dtype != b.dtype or a.shape != b.shape or not torch.allclose(a, b, limit, limit, equal_nan=True):
            return False
    return True


@pytest.mark.timeout(300)
def test_some_operators_compute_what_they_compute_of_plain_tensors() -> None:
    for found, compared in run_ranks(differing, 2, SOME, 6, 2):
        assert not found
        assert compared > 60


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_operators_compute_what_they_compute_of_plain_tensors(ranks: int) -> None:
    for found, compared in run_ranks(differing, ranks, [], 20, ranks, timeout_s=3000):
        assert not found, "\n".join(found)
        assert compared > 2000
