"""The source text of Python's own standard library, as sequences of characters of unequal length."""

import os
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from ..strategies.core.errors import ConfigError

PAD = 0
"""Fills the end of a sequence; never predicted."""
UNKNOWN = 1
"""Every character outside of `ALPHABET`."""
ALPHABET = "\n\t" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
VOCABULARY_SIZE = len(ALPHABET) + 2

_IDS = {char: index for index, char in enumerate(ALPHABET, start=2)}


def encode(text: str) -> Tensor:
    """Turn text into ids of shape (len(text),), int64 in 1..`VOCABULARY_SIZE` - 1."""
    return torch.tensor([_IDS.get(char, UNKNOWN) for char in text], dtype=torch.long)


def read_stdlib(max_chars: int) -> list[Tensor]:
    """Read the standard library's top-level modules in the order of their names.

    Args:
        max_chars: characters to read in all; the last file is cut there.

    Returns:
        The ids of each file, in order.

    Raises:
        ConfigError: this Python carries no source files.
    """
    folder = Path(os.__file__).parent
    texts: list[Tensor] = []
    for path in sorted(folder.glob("*.py")):
        if max_chars <= 0:
            break
        text = path.read_text(encoding="utf-8", errors="replace")[:max_chars]
        max_chars -= len(text)
        texts.append(encode(text))
    if not texts:
        raise ConfigError(f"char_lm reads Python's own source files and found none in {folder}. Use another Python.")
    return texts


def cut(text: Tensor, max_length: int, generator: torch.Generator) -> list[Tensor]:
    """Cut a text into sequences of unequal length, as sentences or documents are.

    Args:
        text: shape (L,).
        max_length: characters of the longest sequence; the shortest have a quarter of it.
        generator: draws the lengths.

    Returns:
        Consecutive sequences which make up the text; what is left at the end, if shorter than the shortest, is dropped.
    """
    shortest = max(2, max_length // 4)
    pieces: list[Tensor] = []
    start = 0
    while len(text) - start >= shortest:
        length = int(torch.randint(shortest, max_length + 1, (), generator=generator))
        pieces.append(text[start : start + length])
        start += length
    return pieces


def collate(sequences: list[Tensor]) -> Tensor:
    """Pad sequences to the longest: a batch of shape (N, longest)."""
    return pad_sequence(sequences, batch_first=True, padding_value=PAD)


class StdlibTextDataModule(pl.LightningDataModule):
    """Sequences of characters of the standard library's source, of unequal length.

    Of every ten files one validates, one tests and eight train, so that no text is in two splits.

    Args:
        batch_size: sequences per batch of one loader.
        max_length: characters of the longest sequence; the shortest have a quarter of it.
        max_chars: characters read in all.
        split_seed: draws the lengths of the sequences, whatever the seed of the run.
        num_workers: processes per loader; 0 reads in the training process (the text is in memory).

    Raises:
        ConfigError: a length is too small, or this Python carries no source files.
    """

    def __init__(
        self,
        batch_size: int = 32,
        max_length: int = 128,
        max_chars: int = 1_000_000,
        split_seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if max_length < 2:
            raise ConfigError(f"StdlibTextDataModule: max_length={max_length}, and a sequence needs 2 characters.")
        self.batch_size = batch_size
        self.max_length = max_length
        self.max_chars = max_chars
        self.split_seed = split_seed
        self.num_workers = num_workers
        self.train_set: list[Tensor] = []
        self.val_set: list[Tensor] = []
        self.test_set: list[Tensor] = []

    def setup(self, stage: str | None = None) -> None:
        """Read the text and cut it into sequences, the same ones in every process."""
        if self.train_set:
            return
        texts = read_stdlib(self.max_chars)
        if len(texts) < 10:
            raise ConfigError(
                f"StdlibTextDataModule: max_chars={self.max_chars} is reached after {len(texts)} files, and three "
                "splits need 10. Raise data.max_chars."
            )
        generator = torch.Generator().manual_seed(self.split_seed)
        for index, text in enumerate(texts):
            split = {8: self.val_set, 9: self.test_set}.get(index % 10, self.train_set)
            split.extend(cut(text, self.max_length, generator))

    def train_dataloader(self) -> DataLoader[Tensor]:
        """The training sequences, in a new order each epoch."""
        return self._loader(self.train_set, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """The validation sequences, in order."""
        return self._loader(self.val_set)

    def test_dataloader(self) -> DataLoader[Tensor]:
        """The test sequences, in order."""
        return self._loader(self.test_set)

    def predict_dataloader(self) -> DataLoader[Tensor]:
        """The test sequences, in order."""
        return self._loader(self.test_set)

    def unigram_loss(self) -> float:
        """What the best model without memory scores on the validation text.

        Returns:
            Nats per character when each is predicted by its frequency in the training text (counts start at 1).
        """
        counts = torch.cat(self.train_set).bincount(minlength=VOCABULARY_SIZE).double() + 1
        log_probs = (counts / counts.sum()).log()
        # The first character of a sequence is given, not predicted.
        return -log_probs[torch.cat([sequence[1:] for sequence in self.val_set])].mean().item()

    def _loader(self, sequences: list[Tensor], shuffle: bool = False) -> DataLoader[Tensor]:
        assert sequences, "setup comes first"
        return DataLoader(
            sequences,  # pyright: ignore[reportArgumentType]  # a list is a map-style data set
            batch_size=self.batch_size,
            shuffle=shuffle,
            collate_fn=collate,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )
