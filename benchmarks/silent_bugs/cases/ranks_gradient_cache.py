"""Gradients of embeddings that are cached, and go backward through the network in chunks, on two ranks."""

from functools import partial
from typing import Any

import torch
from frameworks.problem import Batch, Problem
from silent_bugs.case import Case, rows
from silent_bugs.cases.accumulated_contrast import encoder
from torch import Tensor
from torch.nn import functional as F

CHUNK = 2


def margins(embeddings: Tensor) -> Tensor:
    """The mean over samples of how much less than a margin their three vectors are apart."""
    anchor, near, far = embeddings.unbind(1)
    return F.triplet_margin_loss(anchor, near, far, margin=3.0)


def chunks(batch: Batch) -> Any:
    x = batch["x"]
    return torch.stack((x[:, :3], x[:, 3:], x[:, ::2]), 1).split(CHUNK)


def cached(net: Any, batch: Batch) -> Tensor:
    with torch.no_grad():
        embeddings = torch.cat([net(chunk) for chunk in chunks(batch)])
    embeddings.requires_grad_()
    loss = margins(embeddings)
    (gradients,) = torch.autograd.grad(loss, embeddings)
    loss = loss.detach().requires_grad_()
    loss.register_hook(partial(through, net, batch, gradients))
    return loss


def through(net: Any, batch: Batch, gradients: Tensor, scale: Tensor) -> None:
    """The backward pass of the loss: chunk by chunk, from the cached gradients on."""
    with torch.enable_grad():
        for chunk, gradient in zip(chunks(batch), gradients.split(CHUNK), strict=True):
            (net(chunk) * gradient * scale).sum().backward()


CASE = Case(
    issue="huggingface/sentence-transformers#3862",
    wrong="loses the gradients of all chunks but the last",
    problem=Problem(encoder, cached, lambda: rows(32), ranks=2),
)
