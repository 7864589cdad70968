"""What a run showed or how it failed, as plain values that travel between processes, and comparisons of two runs."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def whole(tensor: Any) -> torch.Tensor:
    """A tensor that may be sharded, with the values of all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def kept(value: Any) -> Any:
    """A copy of a value that can travel; of shards all ranks must take one, and get the whole."""
    if isinstance(value, torch.Tensor):
        found = whole(value.detach())
        return (found.to_dense() if found.is_sparse else found).cpu().clone()
    if isinstance(value, Mapping):
        return {str(key): kept(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [kept(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return torch.as_tensor(value) if type(value).__module__ == "numpy" else f"<{type(value).__name__}>"


def flat(value: Any, *path: Any) -> dict[tuple[Any, ...], Any]:
    """The leaves of dicts and lists, by their paths."""
    if not isinstance(value, (Mapping, list, tuple)):
        return {path: value}
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {place: leaf for key, item in items for place, leaf in flat(item, *path, key).items()}


def differences(
    found: Any, expected: Any, are_alike: Callable[[Any, Any], bool], *path: Any
) -> dict[tuple[Any, ...], tuple[Any, Any]]:
    """(found, expected) of each leaf that differs, by its path."""
    mine, theirs = flat(found, *path), flat(expected, *path)
    pairs = {place: (mine.get(place, "(missing)"), theirs.get(place, "(missing)")) for place in {**theirs, **mine}}
    return {place: pair for place, pair in pairs.items() if not are_alike(*pair)}


def alike(found: Any, expected: Any, rtol: float = 0.0, atol: float = 0.0) -> bool:
    """Whether leaves are equal; numbers may differ by `rtol` of the largest one and by `atol`."""
    both = (found, expected)
    if not all(torch.is_tensor(one) or type(one) in (int, float) for one in both):
        return type(found) is type(expected) and found == expected
    a, b = (torch.as_tensor(one, dtype=None if torch.is_tensor(one) else torch.float64) for one in both)
    if a.shape != b.shape or (all(map(torch.is_tensor, both)) and a.dtype != b.dtype):
        return False
    a, b = a.double(), b.double()
    finite = b[b.isfinite()]
    allowed = atol + rtol * (float(finite.abs().max()) if finite.numel() else 0.0)
    return bool(((a == b) | ((a - b).abs() <= allowed) | (a.isnan() & b.isnan())).all())


@dataclass
class Failure:
    """An exception that ended a phase of a run, after steps of the optimizer."""

    phase: str
    kind: str
    message: str
    num_steps: int = 0
    raised_in: str = ""
    trace: str = ""

    @classmethod
    def of(cls, exc: BaseException, phase: str, num_steps: int) -> "Failure":
        frames = traceback.extract_tb(exc.__traceback__)
        where, trace = frames[-1].filename if frames else "", "".join(traceback.format_exception(exc))
        return cls(phase, type(exc).__name__, str(exc), num_steps, where, trace[-3000:])

    @property
    def says_why(self) -> bool:
        """Whether it is a sentence, raised on purpose by Evener or Lightning."""
        places = ("/evener/", "/strategies/", "/trainer/")
        own = any(place in self.raised_in for place in places) or "Set strategy." in self.message  # torch's, explained
        named = self.kind in ("ConfigError", "PartsDiffer", "MisconfigurationException")
        meant = own and self.kind in ("ValueError", "TypeError", "RuntimeError", "NotImplementedError")
        return (named or meant) and len(self.message.split()) >= 5

    @property
    def refuses(self) -> bool:
        """Whether it is a refusal: such a sentence before the first step, or at the start of a test or a prediction.

        A result that can't be joined over the parts of a batch is refused where it is read, in whichever step.
        """
        at_the_start = self.says_why and (self.num_steps == 0 or self.phase not in ("fit", "save"))
        return at_the_start or self.kind == "NoValueError"

    @property
    def order(self) -> tuple[bool, bool]:
        """The least of several ranks' failures is the cause of the others."""
        return not self.refuses, self.kind == "RankError"


@dataclass
class Verdict:
    """What became of a case.

    Args:
        word: `equal`, `refused` or `discarded`, which drawn cases accept; `wrong` where a value differs, `late` for a
            refusal after steps, `crash` for any other exception, `hung`; the corpus has more (`judge.WORDS`).
        detail: the refusal, or the first difference.
        own_steps: whether values that training logs by step without `sync_dist` are rank 0's own, as documented, and
            all others are equal.
    """

    word: str
    detail: str = ""
    own_steps: bool = False

    @property
    def accepted(self) -> bool:
        return self.word in ("equal", "refused", "discarded")
