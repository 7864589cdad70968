"""Rules by torch's own decompositions: losses and normalisations, written as what is computed of each row and a sum."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._decomp import get_decompositions

from .rows import RULES

aten = torch.ops.aten

_NAMES = """nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss mse_loss_backward
    smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward binary_cross_entropy
    binary_cross_entropy_backward soft_margin_loss soft_margin_loss_backward log_sigmoid_forward
    native_layer_norm native_layer_norm_backward native_batch_norm native_batch_norm_backward cudnn_batch_norm
    cudnn_batch_norm_backward native_group_norm native_group_norm_backward std.correction mv dot addmv
    count_nonzero.dim_IntList nansum aminmax norm.ScalarOpt_dim
    binary_cross_entropy_with_logits nan_to_num"""


def _register() -> None:
    for name in _NAMES.split():
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        decomposed = get_decompositions([op]).get(op)
        if decomposed is None:
            continue

        def rule(op: Any, args: Sequence[Any], kwargs: dict[str, Any], of: Any = decomposed) -> Any:
            return of(*args, **kwargs)

        RULES.setdefault(op, rule)


_register()
