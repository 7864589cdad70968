"""Join what steps append to lists of the module: one element per global batch, in the loader's order.

    def validation_step(self, batch, batch_idx):
        self.outs.append({"preds": preds, "loss": loss})   # in on_validation_epoch_end one for each global batch

In evaluation ranks, and the replicas of a process, each keep a list of their own until the epoch's steps have ended.
Then what the parts of one batch appended becomes one element, as results.py joins it, on the host where there are
ranks. In training that happens after each step, and the lists of ranks stay their own.

As many elements as samples, or unequal numbers of them, stay what they are. Of parts of one sample each, numbers,
strings, and tensors of several rows are samples, unless larger parts have shown otherwise.
"""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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
    """Joins the lists of a run's evaluations.

    Args:
        strategy: name that begins messages.
        options: what `verify_batch_dims` returned: of `<step>.<name of the list>`, `sum` or `mean` of all numbers and
            tensors in it, `list` for all elements, or `none`, where all parts append the same.
        gather: exchanges what ranks have appended; None in one process.
        limit_mb: what that may be, of all ranks.
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
        self._parts: list[PartLists] = []
        """The root's, and those of the replicas that have run."""
        self._batch: Key = (0, 0)
        self._num = 0.0
        self._has_begun = False
        self._hook: Replacement | None = None
        self._are_samples: dict[tuple[str, Path], bool] = {}
        """By step and list, whether elements are samples: parts of a single one don't show it."""

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
        """Give each replica that runs a step of evaluation inside the block lists of its own.

        Args:
            replicas: the modules of each that have a `log`, the root's first.
            used: the replicas that have samples.
            sizes: their samples.
        """
        if self._gather is None:
            self.begin_batch(None, sum(sizes))
        while len(self._parts) < len(replicas):
            self._parts.append(self._parts[0].copied())
        with given_lists(self._parts, replicas, used):
            yield
        for i, size in zip(used, sizes, strict=True):
            self._parts[i].take(self._batch, size)

    def _end(self, trainer: pl.Trainer, call_hooks: Callable[[], Any]) -> Any:
        """Join the lists, and call the hooks of the epoch's end.

        Raises:
            ConfigError: the lists are too large to be gathered, or parts of a batch can't be joined.
        """
        assert self._hook is not None
        self._hook.remove()
        self._hook, rest = None, 1.0
        if trainer.sanity_checking:
            rest = sum(map(float, trainer.num_val_batches)) / sum(map(float, trainer.num_sanity_val_batches))
        if self._gather is not None and not self._has_begun:  # of a rank without batches
            recompute_weights(trainer.lightning_module)
        self._join_all("test_step" if trainer.testing else "validation_step", rest)
        return call_hooks()

    def _join_all(self, step: str, rest: float) -> None:
        """Join the lists; `rest` is how many times as much the whole evaluation appends, if this is a sanity check."""
        root = self._parts[0]
        self._take()
        if self._gather is None and len(self._parts) == 1:
            return
        parts = [(part.added, part.entries()) for part in self._parts]
        if self._gather is not None:
            if not self._is_to_gather(self._gather, parts, rest):
                return
            parts = [part for rank in self._gather(_on_host(parts)) for part in rank]
        for path in dict.fromkeys(path for added, entries in parts for path in (*added, *entries)):
            with torch.no_grad():
                if joined := self.joined(step, path, [added for added, _ in parts]):
                    root.put(path, joined)
                else:
                    join = self._join(step, path)
                    root.update(path, join.entries([entries[path] for _, entries in parts if path in entries]))

    def joined(self, step: str, path: Path, parts: Sequence[Appended]) -> list[Any]:
        """Join what parts of batches have appended to a list.

        Raises:
            ConfigError: it isn't known how.
        """
        batches: dict[Key, list[Added]] = {}
        for one in (one for added in parts for one in added.get(path, ())):
            batches.setdefault(one.batch, []).append(one)
        join, found = self._join(step, path), [batches[key] for key in sorted(batches)]
        are_samples = join.are_samples(found)
        if any(part.num > 1 for of_batch in found for part in of_batch):
            self._are_samples[step, path] = are_samples
        return join.elements(found, are_samples and self._are_samples.get((step, path), True))

    def _join(self, step: str, path: Path) -> Join:
        return Join(self._strategy, step, path[1:], self.options.get(f"{step}.{path[1]}"))

    def _is_to_gather(self, gather: Callable[[Any], list[Any]], parts: Any, rest: float) -> bool:
        """Whether any rank has something to gather; all together not too much."""
        size = sum(value.nbytes for _, value in walk(parts) if isinstance(value, (Tensor, np.ndarray)))
        ranks = gather((any(map(any, parts)), size))
        total = sum(size for _, size in ranks) * rest / 2**20
        if total > self._limit_mb:
            raise ConfigError(
                f"{self._strategy}: lists that evaluation steps append to hold {total:,.0f} MiB over all ranks, and "
                f"strategy.gather_lists_mb={self._limit_mb:g} are gathered at most. Use a metric of torchmetrics, or "
                "raise it, if the host's memory holds as much for each rank."
            )
        return any(has for has, _ in ranks)


class BatchLists:
    """What the parts of a training batch append to lists: what one device would, once they are joined.

    Args:
        lists: says how.
        names: the attributes that have lists, by their modules' numbers.
        modules: those of each part that have a `log`, the root's first; micro-batches have the same ones.
        sizes: samples of each part.
    """

    def __init__(
        self, lists: EvaluationLists, names: Collection[Path], modules: Sequence[Sequence[nn.Module]],
        sizes: Sequence[int],
    ) -> None:  # fmt: skip
        self._lists, self._modules, self._sizes = lists, modules, sizes
        root = PartLists([vars(module) for module in modules[0]], names)
        root.begin()
        is_root = [module[0] is modules[0][0] for module in modules]
        self._parts = [root if own else root.copied() for own in is_root]
        self._copies = [i for i, own in enumerate(is_root) if not own and sizes[i]]

    def given(self) -> AbstractContextManager[None]:
        """Give copies of the module their lists, inside the block."""
        return given_lists(self._parts, self._modules, self._copies)

    def take(self, part: int) -> None:
        """Note what a part has appended, whose step has ended."""
        self._parts[part].take((0, 0), self._sizes[part])

    def join(self, losses: Sequence[Tensor], loss: Tensor | None) -> None:
        """Put what the batch appends in the place of what its parts have, given their losses and the batch's."""
        parts = [part.added for part in dict.fromkeys(self._parts)]
        of_batch = [with_loss(added, losses, loss) for added in parts]
        for path in dict.fromkeys(path for added in parts for path in added):
            try:
                with torch.no_grad():
                    joined = self._lists.joined("training_step", path, of_batch)
            except ConfigError:  # what other samples append
                joined = [value for added in of_batch for one in added.get(path, ()) for value in one.values]
            self._parts[0].put(path, joined)


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        is_view = value.untyped_storage().nbytes() != value.nbytes
        return value.clone() if is_view else value  # not all that it is a view of
    items = children(value) if isinstance(value, (dict, list, tuple)) else None
    return value if items is None else rebuild(value, [_on_host(child) for _, child in items])
