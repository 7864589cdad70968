"""Define a small language model that predicts the next character of a text."""

import math

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..strategies.core.errors import ConfigError
from .stdlib_text import PAD, VOCABULARY_SIZE


class Embedding(nn.Module):
    """Character embedding plus position embedding."""

    def __init__(self, width: int, max_length: int) -> None:
        super().__init__()
        self.chars = nn.Embedding(VOCABULARY_SIZE, width)
        self.positions = nn.Embedding(max_length, width)
        # Small, so that a head that shares these weights starts near the uniform distribution.
        nn.init.normal_(self.chars.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids of shape (N, T) to vectors of shape (N, T, width)."""
        return self.chars(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each added to its input.

    Source: "Attention is all you need" (Vaswani et al. 2017), with the norms first (Xiong et al. 2020).
    """

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, width) to (N, T, width); position t sees the positions up to t."""
        x = x + self.drop(self.out(self._attend(self.norm_1(x))))
        return x + self.drop(self.mlp(self.norm_2(x)))

    def _attend(self, x: Tensor) -> Tensor:
        num, length, width = x.shape
        heads = self.qkv(x).view(num, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        # Padding is at the end and attention is causal, so no padding mask is needed.
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return mixed.transpose(1, 2).reshape(num, length, width)


class CharLM(pl.LightningModule):
    """A decoder-only transformer that predicts the next character.

    Args:
        lr: learning rate of AdamW after the warm-up.
        warmup_steps: number of optimizer steps in which the learning rate increases linearly to `lr`.
        weight_decay: weight decay of AdamW, multiplied by `lr`.
        width: embedding size; a multiple of `num_heads`.
        num_blocks: transformer blocks.
        num_heads: attention heads per block.
        max_length: characters of the longest sequence.
        dropout: fraction of activations dropped in training; above 0, strategies draw different random numbers.
        tie_embedding: whether input and output share one embedding.

    Raises:
        ConfigError: `width` is not a multiple of `num_heads`.
    """

    def __init__(
        self,
        lr: float = 4e-3,
        warmup_steps: int = 50,
        weight_decay: float = 0.01,
        width: int = 64,
        num_blocks: int = 4,
        num_heads: int = 4,
        max_length: int = 128,
        dropout: float = 0.0,
        tie_embedding: bool = False,
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ConfigError(f"CharLM: width={width} must be a multiple of num_heads={num_heads}.")
        self.save_hyperparameters()
        self.lr = lr
        self.warmup_steps = warmup_steps
        self.weight_decay = weight_decay
        self.embedding = Embedding(width, max_length)
        self.blocks = nn.Sequential(*(Block(width, num_heads, dropout) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY_SIZE, bias=False)
        if tie_embedding:
            self.head.weight = self.embedding.chars.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Score each next character.

        Args:
            ids: shape (N, T), T at most `max_length`.

        Returns:
            Logits of shape (N, T, `VOCABULARY_SIZE`); those at position t are for the character at t + 1.
        """
        return self.head(self.norm(self.blocks(self.embedding(ids))))

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        """Return the mean loss over the predicted characters, and their number as `loss_weight`."""
        loss, num_chars = self._loss(batch)
        self.log("train/loss", loss.detach(), batch_size=len(batch), prog_bar=True)
        return {"loss": loss, "loss_weight": num_chars}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log `val/loss` and `val/bits_per_char`."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log `test/loss` and `test/bits_per_char`."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the most likely next character at each position, shape (N, T)."""
        return self(batch).argmax(dim=-1)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[dict[str, object]]]:
        """Return AdamW over all parameters, with a linear warm-up."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        warmup = max(1, self.warmup_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def _loss(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean cross entropy in nats over all characters except padding, and their number."""
        targets = batch[:, 1:]
        logits = self(batch[:, :-1])
        num_chars = (targets != PAD).sum()
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")
        return total / num_chars.clamp(min=1), num_chars

    def _evaluate(self, batch: Tensor, split: str) -> None:
        loss, num_chars = self._loss(batch)
        metrics = {f"{split}/loss": loss, f"{split}/bits_per_char": loss / math.log(2)}
        self.log_dict(metrics, batch_size=int(num_chars), prog_bar=True, sync_dist=True)
