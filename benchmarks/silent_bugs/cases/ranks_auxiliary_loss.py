"""A mean over tokens plus a tenth of a plain mean (a router's balance), on two ranks."""

from typing import Any

from frameworks.problem import Batch, Problem
from silent_bugs.case import Case, language_model, sentences, token_mean
from torch import Tensor


def with_balance(net: Any, batch: Batch, num: Any = None) -> Tensor:
    return token_mean(net, batch, num) + 0.1 * net(batch["x"]).square().mean()


CASE = Case(
    issue="huggingface/transformers#48706",
    wrong="multiplies the auxiliary loss by the number of ranks, or averages the token means",
    problem=Problem(language_model, with_balance, lambda: sentences(32), ranks=2, tokens=True),
)
