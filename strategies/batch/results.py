"""Join what the parts of batches return, append to lists, or give metrics to what one device has for whole batches.

Rows and elements of lists are joined, dictionaries and tuples by each value; fractions are means, counts add up.
"""

import builtins
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities import move_data_to_device
from pytorch_lightning.loops.optimization.automatic import ClosureResult
from torch import Tensor

from ..core.devices import scalar
from ..core.errors import ConfigError, PartsDiffer
from ..core.module_log import NoValue, known, no_value
from ..core.types import Batch, Sizes
from .structure import (
    BatchStructure,
    DeclaredDims,
    Path,
    are_samples,
    called,
    children,
    is_array,
    is_sequence,
    num_samples,
    rebuild,
)

Batches: TypeAlias = Sequence[tuple[Sequence[Any], Sequence[float]]]
"""For each batch what its parts have at one place, and their samples."""


class Unknown(Exception):
    """A value of the whole batch does not follow from those of its parts; says why."""


class Joiner:
    """Joins the values of parts that steps return, append to lists, or give metrics; what unequal parts show is kept.

    `word` tells what the user said of a path: `sum`, `mean`, `list`, `rows` or `shared`; `unknown` makes of a path and
    the reason what stands for a value that can't be joined, or raises.
    """

    def __init__(
        self,
        word: Callable[[Path], str | None],
        unknown: Callable[[Path, str], Any],
        appended: bool = False,
        given: bool = False,
    ) -> None:
        self._word, self._unknown, self._appended, self._given = word, unknown, appended, given
        self.follow: dict[Path, bool] = {}
        self.adds = False  # whether whole numbers that a metric is given are counts

    def join(self, batches: Batches, path: Path = (), device: torch.device | None = None) -> list[Any]:
        """Join the values at a path: one for each batch, on a device, or on that of the first part."""
        if all(isinstance(parts[0], NoValue) for parts, _ in batches):
            return [known(parts[0]) for parts, _ in batches]
        try:
            return self._joined(batches, path, device)
        except Unknown as exc:
            return [self._unknown(path, str(exc))] * len(batches)

    def _joined(self, batches: Batches, path: Path, device: torch.device | None) -> list[Any]:
        (first, *_), sizes = batches[0]
        word = self._word(path)
        if word in ("sum", "mean") and (is_array(first) or children(first) is None):
            return [combine(parts, of, word, device) for parts, of in batches]
        if len(kinds := sorted({type(part).__name__ for parts, _ in batches for part in parts})) > 1:
            raise Unknown(f"differs between parts in its type ({', '.join(kinds)})")
        if word == "shared":
            if not isinstance(first, Tensor) and not all(are_equal(parts) for parts, _ in batches):
                raise Unknown("differs between parts, and batch_dims says that it is the same for all samples")
            return [parts[0] for parts, _ in batches]
        if is_array(first):  # those given to metrics have rows of any number, of tokens or masked
            if word is None and not (self._given or self._are_samples(batches, path, len)):
                raise Unknown(f"has {len(first)} rows in parts of {' and '.join(f'{n:g}' for n in sizes[:2])} samples")
            if len({part.shape[1:] for part in batches[0][0]}) > 1:
                raise Unknown("has rows of other shapes in other parts")
            if isinstance(first, np.ndarray):
                return [np.concatenate(parts) for parts, _ in batches]
            return [torch.cat([part.to(device or parts[0].device) for part in parts]) for parts, _ in batches]
        if is_sequence(first) and (word == "list" or (word is None and self._are_samples(batches, path, len))):
            return [type(first)([value for part in parts for value in part]) for parts, _ in batches]
        if children(first) is None:
            return self._leaves(batches, path, device)
        items = [([dict(children(part) or ()) for part in parts], sizes) for parts, sizes in batches]
        keys = list(items[0][0][0])
        if any(list(part) != keys for parts, _ in items for part in parts):
            raise Unknown("differs between parts in its keys or its length")
        of_key = {key: [([part[key] for part in parts], sizes) for parts, sizes in items] for key in keys}
        columns = [self.join(column, (*path, key), device) for key, column in of_key.items()]
        return [rebuild(parts[0], [column[i] for column in columns]) for i, (parts, _) in enumerate(batches)]

    def _are_samples(self, batches: Batches, path: Path, length: Callable[[Any], float]) -> bool:
        """Whether lengths follow the samples of parts, or vary otherwise; if not they are those of a structure."""
        lengths = [length(part) for parts, _ in batches for part in parts]
        sizes = [size for _, of in batches for size in of]
        if len(set(lengths)) == len(set(sizes)) == 1:  # which tells nothing: what is as long as the parts is samples
            (first, *_), _ = batches[0]
            are_several = _is_structure(first) or (self._appended and type(first) is tuple)
            return self.follow.get(path, not lengths[0] or (lengths == sizes and not are_several))
        self.follow[path] = lengths == sizes or len(set(lengths)) > 1
        return self.follow[path]

    def _leaves(self, batches: Batches, path: Path, device: torch.device | None) -> list[Any]:
        (first, *others), sizes = batches[0]
        if is_fraction(first) and not self._given:
            return [combine(parts, of, "mean", device) for parts, of in batches]
        is_number = not isinstance(first, Tensor)
        alike = is_number and all(are_equal(parts) for parts, _ in batches)
        is_whole = not first.dim() if isinstance(first, Tensor) else isinstance(first, (int, np.integer))
        if is_whole and not (is_fraction(first) or type(first) is bool):
            counts = is_number and all(list(parts) == list(of) for parts, of in batches)
            adds = (self._appended and not alike) or (self._given and self.adds and not is_number)
            if adds or (counts and self._are_samples(batches, path, float)):
                return [combine(parts, of, "sum", device) for parts, of in batches]
            alike = alike and (self._appended or self._given)
        if alike:
            return [parts[0] for parts, _ in batches]
        shown = " and ".join(map(str, [first, *others[:1]])) if is_number else "one number"
        raise Unknown(f"is {shown} in parts of {' and '.join(f'{num:g}' for num in sizes[:2])} samples")


class ResultStructure:
    """How the results of one kind of step on the chunks of a batch become one.

    `step` is its name, with which errors call the result, and the paths of `options`, of `verify_batch_dims`, begin.
    """

    def __init__(self, step: str, options: Mapping[str, str] | None = None) -> None:
        self._step, self._declared = step, DeclaredDims(options or {}, (step,))
        self._joiner = Joiner(
            lambda path: "sum" if path == ("loss_weight",) else self._declared.word(path), self._no_value
        )

    def join(self, results: Sequence[Any], sizes: Sizes, device: torch.device | None = None) -> Any:
        """What one device would return, of the results of the chunks with samples; on a device, or the first's.

        A value that can't be joined raises NoValueError where it is used, which names it.
        """
        used = [size for size in sizes if size]
        assert len(results) == len(used) > 0
        if all(result is None for result in results):
            return None
        if len(results) == 1:
            return results[0] if device is None else move_data_to_device(results[0], device)
        return self._joiner.join([(results, used)], (), device)[0]

    def _no_value(self, path: Path, why: str) -> Any:
        """What raises where somebody reads it: most results are read by nobody, but for predictions."""
        message = (
            f"{called(path, self._step)} {why}, so that it isn't known what it is of the whole batch. Return a mean, "
            "or a tensor with one row per sample; or set strategy."
            f"batch_dims={{{self._declared.key(path)}: sum}}, mean, list, 0 (rows) or none (the same in all parts)."
        )
        if self._step == "predict_step":
            raise PartsDiffer(message)
        return no_value(message)


def is_fraction(value: Any) -> bool:
    """Whether a value is a floating-point number, which is taken for a mean over samples; counts add up."""
    if isinstance(value, Tensor):
        return not value.dim() and value.is_floating_point()
    return isinstance(value, (float, np.floating))


def are_equal(parts: Sequence[Any]) -> bool:
    """Whether chunks returned the same value, which is no tensor."""
    try:
        return all(type(part) is type(parts[0]) and bool(part == parts[0]) for part in parts)
    except (RuntimeError, ValueError):
        return False  # arrays inside have no single truth value


def _is_structure(value: Any) -> bool:
    """Whether a list that is as long as the parts is none of samples: what it holds has them, or is a mean."""
    is_mixed = type(value) is tuple and (len(set(map(type, value))) > 1 or any(map(is_fraction, value)))
    return is_sequence(value) and (is_mixed or not are_samples(value, len(value)))


def combine(
    values: Sequence[Any], weights: Sequence[Any], how: str = "mean", device: torch.device | None = None
) -> Any:
    """Combine the numbers of parts, or tensors of one shape, to the whole batch's `mean`, `sum`, `max` or `min`.

    In a mean a value of no weight counts for nothing, be it nan; of weights that are all zero (a batch of padding only)
    all count alike. Tensors are combined on a device, or on that of the first one.
    """
    first = next((value for value in values if isinstance(value, Tensor)), None)
    if first is not None:
        place = device or first.device
        values = [value.to(place) if isinstance(value, Tensor) else scalar(value, place) for value in values]
        weights = [weight.to(place) if isinstance(weight, Tensor) else weight for weight in weights]
    if how in ("max", "min"):
        return getattr(builtins, how)(values) if first is None else getattr(torch.stack([*values]), f"a{how}")(0)
    if how == "mean":
        total: Any = sum(weights[1:], start=weights[0])
        if isinstance(total, Tensor):
            shares = [torch.where(total == 0, 1.0 / len(weights), weight / total) for weight in weights]
            values = [torch.where(share != 0, value * share, 0.0) for value, share in zip(values, shares, strict=True)]
        elif first is None and total:
            return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total
        else:
            shares = [weight / total if total else 1.0 / len(weights) for weight in weights]
            values = [value * share for value, share in zip(values, shares, strict=True)]
    return sum(values[1:], start=values[0])


FOUND = "found_loss_weight"
"""What a loss was found to divide by, beside it in the output of a step, in place of a `loss_weight`."""


@dataclass
class ChunkLosses:
    """The losses of the chunks that have samples, each on its own device, and their samples or `loss_weight`."""

    losses: list[Tensor]
    weights: list[Tensor | float]

    def combine(self, device: torch.device) -> Tensor:
        """The loss of the whole batch, on `device`, of shape ()."""
        losses = [loss.reshape(()) if loss.dim() else loss for loss in self.losses]
        return combine(losses, self.weights, "mean", device)

    def total(self, device: torch.device) -> Tensor | float:
        """The sum of the weights; a float if all of them are floats."""
        return combine([1.0 * weight for weight in self.weights], [], "sum", device)


def chunk_losses(outputs: Sequence[Any], sizes: Sequence[int], strategy: str) -> ChunkLosses:
    """The losses and their weights in what `training_step` returned for each chunk with samples, or ConfigError."""
    sizes = [size for size in sizes if size > 0]
    losses: list[Any] = [output.get("loss") if isinstance(output, dict) else output for output in outputs]
    for i, loss in enumerate(losses):
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise ConfigError(
                f"{strategy}: training_step returned a loss of {found} for a chunk of {sizes[i]} samples. Return a "
                "scalar: the mean over the chunk's samples, or the value of evener.over_batch(fn)(...)."
            )
    given = list(map(weight_in, outputs))
    weights = [float(size) if weight is None else weight for weight, size in zip(given, sizes, strict=True)]
    return ChunkLosses(losses, weights)


def join_evaluated(
    outputs: Sequence[Any], sizes: Sequence[int], results: ResultStructure, device: torch.device, strategy: str
) -> tuple[Any, ChunkLosses | None]:
    """Join what a step of evaluation returned for each chunk; returns the losses, too, if it returned these."""
    joined = results.join(outputs, sizes, device)
    if not all(own and not own[0].dim() for own in map(losses_in, outputs)):
        return joined, None
    losses = chunk_losses(outputs, sizes, strategy)
    loss = losses.combine(device)
    return {**joined, "loss": loss} if isinstance(joined, dict) else loss, losses


def loss_weight(output: Any, batch: Batch, structure: BatchStructure | None = None) -> Tensor | float:
    """What one step's loss weighs: the `loss_weight` in its output (a tensor stays one), else the batch's samples.

    Raises:
        ConfigError: the module returned no weight, and the batch holds no tensor to count samples by.
    """
    if (weight := weight_in(output)) is not None:
        return weight
    count = num_samples(batch) if structure is None else structure.num_samples(batch)
    if count is None:
        raise ConfigError(
            f"The batch of type {type(batch).__name__} holds no tensor with a dimension, so its samples can't be "
            'counted. Return {"loss": loss, "loss_weight": n} from training_step.'
        )
    return float(count)


def is_loss(value: Any, loss: Tensor) -> bool:
    """Whether a logged value is the loss, or the loss detached."""
    is_number = isinstance(value, Tensor) and value.numel() == 1 and value.layout is torch.strided
    return is_number and value.data_ptr() == loss.data_ptr()


def weighs_in_loop(trainer: "pl.Trainer") -> bool:
    """Whether the loop weighs micro-batches, and divides by the sum of all weights, so that the strategy must not."""
    return bool(getattr(trainer, "exact_accumulation", False)) and trainer.accumulate_grad_batches > 1


def weight_in(output: Any) -> Any:
    """What the loss in a step's output is a mean over, as the module has given it, or as it was found; else None."""
    if not isinstance(output, dict):
        return None
    given = output.get("loss_weight")
    return output.get(FOUND) if given is None else given


def loss_and_others(output: Any) -> tuple[Tensor, dict[str, Any]]:
    """Take apart what a training step returned: the loss, and what hooks get beside it; Lightning's error without."""
    if isinstance(output, Tensor):
        return output, {}
    if not isinstance(output, Mapping) or output.get("loss") is None:
        ClosureResult.from_training_step_output(output)  # raises it
    return output["loss"], {key: value for key, value in output.items() if key not in ("loss", FOUND)}


def losses_in(output: Any) -> list[Tensor]:
    """The loss that a training step has returned, as a list of at most one; wrappers may pass on a copy of it."""
    loss = output.get("loss") if isinstance(output, dict) else output
    return [loss.detach()] if isinstance(loss, Tensor) else []
