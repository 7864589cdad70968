"""Join what evaluation steps append to lists of the module: one element per global batch, in the loader's order.

Ranks, and the replicas of a process, each keep a list of their own until the epoch's steps have ended.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from ..core.errors import ConfigError
from ..core.module_checks import recompute_weights
from ..core.module_log import lightning_modules
from ..core.patching import Replacement
from .part_lists import Added, Appended, Join, Key, PartLists, given_lists, with_loss
from .structure import Path, children, rebuild, walk


class EvaluationLists:
    """Joins the lists of a run's evaluations; `options` is what `verify_batch_dims` returned.

    `gather` exchanges what ranks have appended, of all ranks `limit_mb` at most; None in one process.
    """

    def __init__(
        self,
        strategy: str = "dp",
        options: Mapping[str, str] | None = None,
        gather: Callable[[Any], list[Any]] | None = None,
        limit_mb: float = 0.0,
    ) -> None:
        self._strategy, self.options, self._limit_mb = strategy, options or {}, limit_mb
        self._gather = self._gather_ranks = gather
        self._parts: list[PartLists] = []  # the root's, and those of the replicas that have run
        self._batch: Key = (0, 0)
        self._num = 0.0
        self._has_begun = False
        self._hook: Replacement | None = None
        # by step and list, whether elements are samples: parts of a single one don't show it
        self._are_samples: dict[tuple[str, Path], bool] = {}

    def begin(self, module: pl.LightningModule) -> None:
        """Begin an evaluation: its lists are looked at when its first batch comes, and joined after the last."""
        self._parts = [PartLists([vars(part) for part in lightning_modules(module)])]
        self._has_begun, self._gather = False, self._gather_ranks
        if self._hook is not None:  # of an evaluation that has failed
            self._hook.remove()
        loop = module.trainer._evaluation_loop
        self._hook = Replacement(loop, "_on_evaluation_epoch_end", partial(self._end, module.trainer))

    def stay(self) -> None:
        """Leave the lists of this evaluation as they are: each rank evaluates all batches."""
        self._gather = None

    def begin_batch(self, batch: Key | None, num: float) -> None:
        """Learn which batch the next step gets, and how many samples of it this process has."""
        self._take()
        number = self._batch[1] + 1 if self._has_begun else 0
        self._batch, self._num, self._has_begun = batch or (self._batch[0], number), num, True

    def _take(self) -> None:
        """Note what the root's step on the last batch has appended, or what there is before the first."""
        if self._has_begun:
            self._parts[0].take(self._batch, self._num)
        else:
            self._parts[0].begin()

    @contextmanager
    def of_replicas(
        self, replicas: Sequence[Sequence[nn.Module]], used: Sequence[int], sizes: Sequence[int]
    ) -> Generator[None]:
        """Give each replica that is used, with so many samples, lists of its own inside the block."""
        if self._gather is None:
            self.begin_batch(None, sum(sizes))
        while len(self._parts) < len(replicas):
            self._parts.append(self._parts[0].copied())
        with given_lists(self._parts, replicas, used):
            yield
        for i, size in zip(used, sizes, strict=True):
            self._parts[i].take(self._batch, size)

    def _end(self, trainer: pl.Trainer, call_hooks: Callable[[], Any]) -> Any:
        """Join the lists, and call the hooks of the epoch's end."""
        assert self._hook is not None
        self._hook.remove()
        self._hook, share = None, 1.0
        if trainer.sanity_checking:  # of what the whole evaluation appends
            whole = sum(map(float, trainer.num_val_batches))  # infinite, if a stream does not tell
            share = sum(map(float, trainer.num_sanity_val_batches)) / whole or 1.0
        if self._gather is not None and not self._has_begun:  # of a rank without batches
            recompute_weights(trainer.lightning_module)
        self._take()
        parts = [(part.added, part.entries()) for part in self._parts]
        if self._gather is not None:
            parts = self._gathered(self._gather, parts, share)
        step, paths = "test_step" if trainer.testing else "validation_step", [(*added, *new) for added, new in parts]
        for path in dict.fromkeys(path for own in paths for path in own) if len(parts) > 1 else ():
            with torch.no_grad():
                if joined := self.joined(step, path, [added for added, _ in parts]):
                    self._parts[0].put(path, joined)
                else:
                    entries = [new[path] for _, new in parts if path in new]
                    self._parts[0].update(path, self._join(step, path).entries(entries))
        return call_hooks()

    def _gathered(self, gather: Callable[[Any], list[Any]], parts: list[Any], share: float) -> list[Any]:
        """What all ranks have, if any has something, and all together not too much."""
        size = sum(value.nbytes for _, value in walk(parts) if isinstance(value, (Tensor, np.ndarray)))
        ranks = gather((any(map(any, parts)), size))
        if (total := sum(size for _, size in ranks) / share / 2**20) > self._limit_mb:
            raise ConfigError(
                f"{self._strategy}: lists that evaluation steps append to hold {total:,.0f} MiB over all ranks, and "
                f"strategy.gather_lists_mb={self._limit_mb:g} are gathered at most. Use a metric of torchmetrics, or "
                "raise it, if the host's memory holds as much for each rank."
            )
        return [part for rank in gather(_on_host(parts)) for part in rank] if any(has for has, _ in ranks) else []

    def joined(self, step: str, path: Path, parts: Sequence[Appended]) -> list[Any]:
        """Join what parts of batches have appended to a list, if it is known how."""
        batches: dict[Key, list[Added]] = {}
        for one in (one for added in parts for one in added.get(path, ())):
            batches.setdefault(one.batch, []).append(one)
        join, found = self._join(step, path), [batches[key] for key in sorted(batches)]
        are_samples = join.are_samples(found)
        if any(part.num > 1 for of_batch in found for part in of_batch):
            self._are_samples[step, path] = are_samples
        return join.elements(found, are_samples and self._are_samples.get((step, path), True))

    def join_trained(self, parts: Sequence[PartLists], losses: Sequence[Tensor], loss: Tensor | None) -> None:
        """Put what a training batch appends in the place of what its parts have, given their losses and the batch's."""
        added = [with_loss(part.added, losses, loss) for part in dict.fromkeys(parts)]
        for path in dict.fromkeys(path for own in added for path in own):
            try:
                with torch.no_grad():
                    joined = self.joined("training_step", path, added)
            except ConfigError:  # what other samples append
                joined = [value for own in added for one in own.get(path, ()) for value in one.values]
            parts[0].put(path, joined)

    def _join(self, step: str, path: Path) -> Join:
        return Join(self._strategy, step, path[1:], self.options.get(f"{step}.{path[1]}"))


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        is_view = value.untyped_storage().nbytes() != value.nbytes
        return value.clone() if is_view else value  # not all that it is a view of
    items = children(value) if isinstance(value, (dict, list, tuple)) else None
    return value if items is None else rebuild(value, [_on_host(child) for _, child in items])
