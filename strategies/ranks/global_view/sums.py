"""Rules of products, layers and their gradients, by names of dimensions, and by torch's own decompositions."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table

from .elementwise import aligned, wrap
from .rows import Rule, flat, gathered, is_cut

aten = torch.ops.aten


def by_names(text: str) -> Rule:
    """Make the rule of an operation that computes each element of some dimensions by itself, or sums over it.

    Args:
        text: names of the first dimensions of arguments and results, as in `torch.einsum`. Of an argument that lacks a
            name all is needed; results that lack it are sums.
    """
    inputs, outputs = (side.split(",") for side in text.split("->"))

    def rule(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        cut_ones = [(one, dims) for one, dims in zip(args, inputs, strict=False) if is_cut(one)]
        lead, dims = max(cut_ones, key=lambda one: one[0].numel(), default=(None, ""))
        if lead is None or lead.cut.dim >= len(dims):
            return NotImplemented
        cut, name = lead.cut, dims[lead.cut.dim]
        given = list[Any]()
        for one, dims in zip_longest(args, inputs[: len(args)], fillvalue=""):
            dim = dims.find(name)
            if dim < 0 or not isinstance(one, (Tensor, list)):
                given.append(gathered(one))
            elif isinstance(one, list):  # a shape
                given.append(cut.at(dim).own_shape(one))
            elif one.shape[dim : dim + 1] != (cut.length,):
                return NotImplemented
            else:
                given.append(aligned(one, cut.at(dim), dim - one.dim()))
        result = op(*given, **{key: gathered(one) for key, one in kwargs.items()})
        found = [
            one if one is None else wrap(one, cut.at(dims.index(name))) if name in dims else cut.exchange.sum(one)
            for one, dims in zip(flat([result]), outputs, strict=True)
        ]
        return tuple(found) if isinstance(result, tuple) else found[0]

    return rule


def added(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A product that is added to a tensor."""
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    found = (aten.mm if op is aten.addmm.default else aten.bmm)(*args[1:])
    found = found if alpha == 1 else found * alpha
    return found if beta == 0 else found + (args[0] if beta == 1 else args[0] * beta)


def embedding_backward(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The gradient of a table, which may count how often each of its rows was read."""
    return NotImplemented if args[4] else by_names("abcdef,abcdef->")(op, args, kwargs)


def decomposed(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What torch itself composes of operations that have rules: losses, and normalisation."""
    return decomposition_table[op](*args, **kwargs)


RULES: Mapping[str, Rule] = {
    "mm": by_names("mk,kn->mn"),
    "bmm": by_names("bmk,bkn->bmn"),
    "addmm baddbmm": added,
    "embedding": by_names(",abcdef->abcdef"),
    "embedding_dense_backward": embedding_backward,
    "convolution": by_names("n->n"),
    "convolution_backward": by_names("n,n->n,,"),
    "max_pool2d_with_indices adaptive_max_pool2d": by_names("n->n,n"),
    "max_pool2d_with_indices_backward": by_names("n,n,,,,,,n->n"),
    "adaptive_max_pool2d_backward": by_names("n,n,n->n"),
    "avg_pool2d _adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d": by_names("n->n"),
    "avg_pool2d_backward _adaptive_avg_pool2d_backward": by_names("n,n->n"),
    "upsample_nearest2d_backward upsample_bilinear2d_backward": by_names("n,,n->n"),
    """nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss mse_loss_backward
    smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward binary_cross_entropy
    binary_cross_entropy_backward binary_cross_entropy_with_logits soft_margin_loss soft_margin_loss_backward
    log_sigmoid_forward native_layer_norm native_layer_norm_backward native_batch_norm native_batch_norm_backward
    cudnn_batch_norm cudnn_batch_norm_backward native_group_norm native_group_norm_backward std.correction
    std_mean.correction mv dot addmv count_nonzero.dim_IntList nansum aminmax norm.ScalarOpt_dim""": decomposed,
}
