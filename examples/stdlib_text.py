"""Provide the source of Python's standard library as character sequences of unequal length."""

import os
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from ..strategies.core.errors import ConfigError

PAD = 0
"""Padding at the end of a sequence; never predicted."""
UNKNOWN = 1
"""Stands for every character outside of `ALPHABET`."""
ALPHABET = "\n\t" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
VOCABULARY_SIZE = len(ALPHABET) + 2

_IDS = {char: index for index, char in enumerate(ALPHABET, start=2)}


def encode(text: str) -> Tensor:
    """Convert text to ids of shape (len(text),), int64 in 1..`VOCABULARY_SIZE` - 1."""
    return torch.tensor([_IDS.get(char, UNKNOWN) for char in text], dtype=torch.long)


def read_stdlib(max_chars: int) -> list[Tensor]:
    """Read the standard library's top-level modules, sorted by name.

    Args:
        max_chars: total number of characters to read; the last file is truncated.

    Returns:
        The ids of each file, in order.

    Raises:
        ConfigError: this Python has no source files.
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
        raise ConfigError(f"char_lm needs Python's source files, but {folder} has none. Use another Python.")
    return texts


def cut(text: Tensor, max_length: int, generator: torch.Generator) -> list[Tensor]:
    """Cut a text into sequences of unequal length, like sentences or documents.

    Args:
        text: shape (L,).
        max_length: number of characters in the longest sequence; the shortest have a quarter of it.
        generator: draws the lengths.

    Returns:
        Consecutive sequences of the text; a remainder shorter than the shortest sequence is dropped.
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
    """Pad sequences to the longest one; returns a batch of shape (N, longest)."""
    return pad_sequence(sequences, batch_first=True, padding_value=PAD)


class StdlibTextDataModule(pl.LightningDataModule):
    """Character sequences of unequal length from the standard library's source.

    Of every ten files one is for validation, one for testing and eight for training, so no text is in two splits.

    Args:
        batch_size: sequences per batch of one loader.
        max_length: number of characters in the longest sequence; the shortest have a quarter of it.
        max_chars: total number of characters to read.
        split_seed: seed of the lengths of the sequences, independent of the run's seed.
        num_workers: worker processes per loader; 0 loads in the training process (the text is in memory).

    Raises:
        ConfigError: a length is too small, or this Python has no source files.
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
            raise ConfigError(f"StdlibTextDataModule: max_length={max_length} is too small. Give at least 2.")
        self.batch_size = batch_size
        self.max_length = max_length
        self.max_chars = max_chars
        self.split_seed = split_seed
        self.num_workers = num_workers
        self.train_set: list[Tensor] = []
        self.val_set: list[Tensor] = []
        self.test_set: list[Tensor] = []

    def setup(self, stage: str | None = None) -> None:
        """Read the text and cut it into sequences, equal in every process."""
        if self.train_set:
            return
        texts = read_stdlib(self.max_chars)
        if len(texts) < 10:
            raise ConfigError(
                f"StdlibTextDataModule: max_chars={self.max_chars} covers only {len(texts)} files, but the three "
                "splits need 10. Increase data.max_chars."
            )
        generator = torch.Generator().manual_seed(self.split_seed)
        for index, text in enumerate(texts):
            split = {8: self.val_set, 9: self.test_set}.get(index % 10, self.train_set)
            split.extend(cut(text, self.max_length, generator))

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return the training sequences, shuffled each epoch."""
        return self._loader(self.train_set, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Return the validation sequences, in order."""
        return self._loader(self.val_set)

    def test_dataloader(self) -> DataLoader[Tensor]:
        """Return the test sequences, in order."""
        return self._loader(self.test_set)

    def predict_dataloader(self) -> DataLoader[Tensor]:
        """Return the test sequences, in order."""
        return self._loader(self.test_set)

    def unigram_loss(self) -> float:
        """Return the loss of the unigram model on the validation text.

        Returns:
            Nats per character when each is predicted by its frequency in the training text (counts start at 1).
        """
        counts = torch.cat(self.train_set).bincount(minlength=VOCABULARY_SIZE).double() + 1
        log_probs = (counts / counts.sum()).log()
        # The first character of a sequence is given, not predicted.
        return -log_probs[torch.cat([sequence[1:] for sequence in self.val_set])].mean().item()

    def _loader(self, sequences: list[Tensor], shuffle: bool = False) -> DataLoader[Tensor]:
        assert sequences, "setup() must be called first"
        return DataLoader(
            sequences,  # pyright: ignore[reportArgumentType]  # a list is a map-style dataset
            batch_size=self.batch_size,
            shuffle=shuffle,
            collate_fn=collate,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),  # copies to a GPU do not wait then
        )
