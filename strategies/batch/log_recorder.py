"""Record what the parts of a batch log and count, and do it once for the whole batch, whose result they return."""

import builtins
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import WarningCache
from torch import Tensor, nn

from ..core.errors import ConfigError
from ..core.module_checks import hooked
from ..core.module_log import LOG_OPTIONS, NoValue, known, module_log, received
from .evaluation_lists import BatchLists, EvaluationLists
from .exact.programs import RETURNED, Program
from .exact.tape import Tape
from .exact.verdict import Values
from .part_metrics import PartMetrics, grouped
from .results import FOUND, ChunkLosses, ResultStructure, chunk_losses, combine, is_loss

_HOW: dict[Any, str] = {
    fx: how for how in ("max", "min", "sum") for fx in (how, getattr(builtins, how), getattr(torch, how))
}
"""What a `reduce_fx` of `self.log` means; others are means."""


@dataclass(frozen=True)
class _Call:
    """One call of `self.log`, with the indices of the replica and of the module in it."""

    replica: int
    module: int
    name: str
    value: Any
    kept: Any
    options: dict[str, Any]


class LogRecorder:
    """Records `self.log` in every part of a batch, and logs each name once, on the root, for the whole batch.

    Args:
        root: the module.
        modules: the modules of each replica, the root's first, all in the same order; micro-batches have the same ones.
        devices: of the parts; values are combined on the first.
        strategy: name that begins error messages.
        lists: joins what parts append to lists of the module.
    """

    def __init__(
        self,
        root: nn.Module,
        modules: Sequence[Sequence[nn.Module]],
        devices: Sequence[torch.device],
        strategy: str,
        lists: EvaluationLists,
    ) -> None:
        self._root, self._strategy, self._device = root, strategy, devices[0]
        self._devices, self._lists = devices, lists
        self._appended: BatchLists | None = None
        self._metrics = self._new_metrics()
        self._told = WarningCache()
        self.modules = [[m for m in replica if isinstance(m, pl.LightningModule)] for replica in modules]
        """Those of each part that have a `log`."""
        self._calls: list[list[_Call]] = []
        self._running = threading.local()
        self._values, self._programs = Values(), dict[str, Program]()
        self._step = "", 0
        self._tapes: dict[int, Tape] = {}
        self.losses: list[Tensor] = []
        """What `replay` logged as the loss of the batch."""
        for i, copies in enumerate(self.modules[1:], start=1):  # a copy runs in steps alone
            for j, copy in enumerate(copies):
                if copy is not self.modules[0][j]:
                    module_log(copy).receiver = partial(self._record, i, j)

    def _new_metrics(self) -> PartMetrics:
        return PartMetrics(self._root, self._devices, self._strategy, lambda: self.part)

    def follow_metrics(self) -> None:
        """Learn whether the module has other metrics than before."""
        if not self._metrics.is_of(self._root):
            self._metrics.close()
            self._metrics = self._new_metrics()

    def close(self) -> None:
        """Restore the methods of the module's metrics."""
        self._metrics.close()

    @contextmanager
    def recording(self, values: Values, step: str, sizes: Sequence[int], loader: int = 0) -> Generator[None]:
        """Record the calls of one step, of parts of so many samples, and what its values are computed of."""
        self._values, self._programs, self._tapes = values, values.all_of(step, loader), {}
        self._step = step, loader
        self._calls = [[] for _ in self.modules]
        logs = ((module_log(module), partial(self._record_root, j)) for j, module in enumerate(self.modules[0]))
        self._appended = None
        if step == "training_step" and values.appends:
            self._appended = BatchLists(self._lists, values.appends, self.modules, sizes)
        own = nullcontext() if self._appended is None else self._appended.given()
        with self._metrics.recording(sizes, values.rows.get(self._step, ())), received(logs), own:
            yield

    @property
    def part(self) -> int:
        """The replica, or micro-batch, that the calling thread runs; the first outside of a step."""
        return getattr(self._running, "part", 0)

    def run(self, part: int, call: Callable[[], Any]) -> Any:
        """Run the step of a replica, or of a micro-batch, in the thread that calls this."""
        before, self._running.part = self.part, part
        try:
            with self._taped(part):
                return call()
        finally:
            self._running.part = before
            if self._appended is not None:
                self._appended.take(part)

    def _taped(self, part: int) -> AbstractContextManager[Any]:
        if not self._programs or part in self._tapes:  # it goes backward
            return nullcontext()
        self._tapes[part] = Tape(self._programs)
        return self._tapes[part]

    def _record_root(self, module: int, *args: Any, **options: Any) -> None:
        replica = self.part
        root = self.modules[0][module]
        if self.modules[replica][module] is not root:
            name = type(root).__name__
            raise ConfigError(
                f"The step of a replica called the original {name}.log, not its own: an object that {name} holds, and "
                "that is not an nn.Module, refers to the original and would run all chunks on the first device. Pass "
                "it the module in the step, or use strategy=ddp."
            )
        self._record(replica, module, *args, **options)

    def replay(self, sizes: Sequence[int], losses: ChunkLosses | None = None, loss: Tensor | None = None) -> None:
        """Call the root's metrics as the parts have, and log the recorded values on the root.

        A logged loss is combined like the loss itself. Other values are weighted by samples, or by the `batch_size` of
        each chunk, unless that is one number for the whole batch. A `reduce_fx` of sum, max or min is applied over the
        whole batch.

        Args:
            sizes: samples per replica; 0 for a replica without samples.
            losses: the chunks' losses, one per replica with samples.
            loss: of the batch; None for the mean of these.
        """
        self.losses = []
        self._metrics.replay(lambda values, parts: self._whole_loss(values, parts, sizes, losses, loss))
        calls, self._calls = self._calls, []
        for same in grouped(calls, lambda call: (call.module, call.name)).values():
            weights, options = self._weighed(same, sizes)
            if isinstance(same[0].value, NoValue):
                value = known(same[0].value)
            else:
                value = self._loss(same, sizes, losses)
                if value is not None and same[0].name not in self._programs:
                    self.losses.append(value)
                value = self._of_program(same, self._combined(same, weights) if value is None else value, options)
            self.modules[0][same[0].module].log(same[0].name, value, **options)
        if self._appended is not None:
            self._appended.join([] if losses is None else losses.losses, loss)

    def combine(self, outputs: list[Any], sizes: Sequence[int], structure: ResultStructure) -> Any:
        """Combine what `training_step` returned for each chunk into one result, and log each recorded value once.

        Args:
            outputs: one per chunk that has samples.
            sizes: samples per chunk.
            structure: of what `training_step` returns.

        Returns:
            A result of the kind that the module returned; None if it skips the batch. A mapping has `loss`, the sum of
            `loss_weight` if the module returned it and, if a hook of the user's reads them, the other values that can
            be joined. That of a single chunk has all its keys.

        Raises:
            ConfigError: a loss is missing, or is not a scalar.
        """
        if all(output is None for output in outputs):
            self.replay(sizes)
            return None
        losses = chunk_losses(outputs, sizes, self._strategy)
        loss = losses.combine(self._device)
        if RETURNED in self._programs:  # by each of its leaves
            used = [i for i, size in enumerate(sizes) if size > 0]
            values = [own.detach() for own in losses.losses]
            loss = loss.clone()  # whose gradient is that of parts; their mean may be nan
            loss.detach().copy_(self._of_parts(RETURNED, used, values, loss.detach().clone()))
        self.replay(sizes, losses, loss.detach())
        if not isinstance(outputs[0], dict):
            return loss
        result = dict(outputs[0]) if len(outputs) == 1 else {}
        result["loss"] = loss
        for weight in outputs[0].keys() & {"loss_weight", FOUND}:
            result[weight] = losses.total(self._device)
        trainer: Any = self._root.trainer
        if len(outputs) > 1 and hooked("on_train_batch_end", trainer, by_user=True):
            for key, value in _joined_rest(outputs, sizes, self._device, structure).items():
                if isinstance(value, NoValue):
                    self._told.info(
                        f"{self._strategy}: training_step's output {key!r} does not reach callbacks: what it is of the "
                        "whole batch isn't known. Return a tensor with one row per sample, or set strategy.batch_dims="
                        f"{{training_step.{key}: sum}}, mean, list, 0 or none."
                    )
                else:
                    result[key] = value
        return result

    def _weighed(self, calls: list[_Call], sizes: Sequence[int]) -> tuple[Sequence[int], dict[str, Any]]:
        """The weight of each call in the value of the batch, and the options to log it with."""
        own = [sizes[call.replica] for call in calls]
        given: list[Any] = [call.options.get("batch_size") for call in calls]
        options = calls[0].options
        if any(isinstance(number, (Tensor, float)) for number in given):  # counted, not a constant
            return given, options | {"batch_size": sum(given)}
        if None not in given:
            if self._values.reading(*self._step, calls[0].name) == "constant":
                return own, options
            return given if any(given) else own, options | {"batch_size": sum(given)}
        if len(calls) < sum(size > 0 for size in sizes):  # only some chunks logged it
            options = options | {"batch_size": sum(own)}
        return own, options

    def _record(self, replica: int, module: int, name: str, value: Any, *args: Any, **options: Any) -> None:
        options.update(zip(LOG_OPTIONS, args, strict=False))
        kept = value if not isinstance(value, Tensor) else _kept(value, options)
        self._calls[replica].append(_Call(replica, module, name, value, kept, options))

    def _loss(self, calls: list[_Call], sizes: Sequence[int], losses: ChunkLosses | None) -> Tensor | None:
        """The batch's loss, if that is what was logged."""
        parts, values = [call.replica for call in calls], [call.value for call in calls]
        if losses is None or not _are_losses(values, parts, sizes, losses):
            return None
        return ChunkLosses([call.kept for call in calls], losses.weights).combine(self._device)

    def _whole_loss(
        self, values: Sequence[Any], parts: Sequence[int], sizes: Sequence[int], losses: ChunkLosses | None, loss: Any
    ) -> Tensor | None:
        if losses is None or not _are_losses(values, parts, sizes, losses):
            return None
        return losses.combine(self._device).detach() if loss is None else loss

    def _of_program(self, calls: list[_Call], otherwise: Any, options: dict[str, Any]) -> Any:
        """The whole batch's value, if there is a program that makes it."""
        name = calls[0].name
        others = options.get("reduce_fx", "mean") != "mean" or not isinstance(otherwise, (Tensor, float))
        if name not in self._programs or len(calls) < len(self._tapes) or others:
            return otherwise
        value = self._of_parts(name, [call.replica for call in calls], [call.kept for call in calls], otherwise)
        return self._values.noted(name, value)

    def _of_parts(self, name: str, parts: Sequence[int], values: Sequence[Any], otherwise: Any) -> Tensor:
        """What a program makes of parts, if it makes their own values."""
        program = self._programs[name]
        rows = [self._tapes[part].rows(program, self._device) for part in parts]
        self._values.calls[-1][0][name] = merged = program.merged(rows)
        own = [torch.as_tensor(value).to(self._device) for value in values]
        fits = torch.stack([program.fits(row, value) for row, value in zip(rows, own, strict=True)]).all()
        value = program.value(merged)
        return torch.where(fits, value, torch.as_tensor(otherwise).to(value))

    def _combined(self, calls: list[_Call], weights: Sequence[Any]) -> Any:
        if not isinstance(calls[0].kept, (Tensor, int, float)):
            return calls[0].kept
        values = [call.kept.reshape(()) if isinstance(call.kept, Tensor) else call.kept for call in calls]
        return combine(values, weights, _HOW.get(calls[0].options.get("reduce_fx"), "mean"), self._device)


def _are_losses(values: Sequence[Any], parts: Sequence[int], sizes: Sequence[int], losses: ChunkLosses) -> bool:
    """Whether values of parts are their losses."""
    used = [i for i, size in enumerate(sizes) if size > 0]
    return list(parts) == used and all(map(is_loss, values, losses.losses))


def _kept(value: Tensor, options: dict[str, Any]) -> Tensor:
    """Keep the value as it is now: `loss += penalty` after `self.log("loss", loss)` must not change it."""
    return value.clone() if options.get("enable_graph") else value.detach().clone()


@torch.no_grad()
def _joined_rest(
    outputs: list[Any], sizes: Sequence[int], device: torch.device, structure: ResultStructure
) -> dict[str, Any]:
    own = ("loss", "loss_weight", FOUND)
    rest = [{key: value for key, value in output.items() if key not in own} for output in outputs]
    joined = structure.join(rest, sizes, device)
    return joined if isinstance(joined, dict) else dict.fromkeys(rest[0], joined)
