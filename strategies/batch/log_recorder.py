"""Record what the parts of a batch log and count, and do it once for the whole batch, whose result they return."""

import builtins
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from ..core.module_checks import hooked
from ..core.module_log import LOG_OPTIONS, NoValue, known, module_log, received
from .exact.programs import RETURNED, Program, Tape
from .exact.verdict import Values
from .part_metrics import PartMetrics, grouped
from .results import FOUND, ChunkLosses, ResultStructure, chunk_losses, combine, is_loss

_HOW: dict[Any, str] = {
    fx: how for how in ("max", "min", "sum") for fx in (how, getattr(builtins, how), getattr(torch, how))
}
"""What a `reduce_fx` of `self.log` means; others are means."""


class _Call(NamedTuple):
    """One call of `self.log` in a part; `kept` is the value as it was then."""

    part: int
    module: int
    name: str
    value: Any
    kept: Any
    options: dict[str, Any]


class LogRecorder:
    """Records `self.log` in every part of a batch, and logs each name once, on the root, for the whole batch.

    Of each part it has the modules, the root's first, all in the same order; micro-batches have the same ones.
    """

    def __init__(
        self,
        root: nn.Module,
        modules: Sequence[Sequence[nn.Module]],
        devices: Sequence[torch.device],
        strategy: str,
    ) -> None:
        self._root, self._strategy, self._device = root, strategy, devices[0]
        self.modules = [[m for m in part if isinstance(m, pl.LightningModule)] for part in modules]
        self.losses: list[Tensor] = []  # what `replay` logged as the loss of the batch
        self.metrics = PartMetrics(root, devices, strategy, lambda: self.part)
        self._running = threading.local()
        self._calls: list[list[_Call]] = []
        self._sizes: Sequence[int] = ()
        self._values, self._programs, self._step = Values(), dict[str, Program](), ("", 0)
        self._tapes: dict[int, Tape] = {}
        for copies in self.modules[1:]:  # a copy runs in steps alone
            for j, copy in enumerate(copies):
                if copy is not self.modules[0][j]:
                    module_log(copy).receiver = partial(self._record, j)

    @contextmanager
    def recording(self, values: Values, step: str, sizes: Sequence[int], loader: int = 0) -> Generator[None]:
        """Record the calls of one step, of parts of so many samples, and what its values are computed of."""
        self._values, self._programs, self._tapes = values, values.all_of(step, loader), {}
        self._step, self._sizes = (step, loader), sizes
        self._calls = [[] for _ in self.modules]
        logs = ((module_log(module), partial(self._record, j)) for j, module in enumerate(self.modules[0]))
        with self.metrics.recording(sizes, values.rows.get(self._step, ())), received(logs):
            yield

    @property
    def part(self) -> int:
        """The replica, or micro-batch, that the calling thread runs; the first outside of a step."""
        return getattr(self._running, "part", 0)

    def run(self, part: int, call: Callable[[], Any]) -> Any:
        """Run the step of a replica, or of a micro-batch, in the thread that calls this."""
        before, self._running.part = self.part, part
        tape: AbstractContextManager[Any] = nullcontext()
        if self._programs and part not in self._tapes:  # else it goes backward
            tape = self._tapes[part] = Tape(self._programs)
        try:
            with tape:
                return call()
        finally:
            self._running.part = before

    def _record(self, module: int, name: str, value: Any, *args: Any, **options: Any) -> None:
        options.update(zip(LOG_OPTIONS, args, strict=False))
        kept = value
        if isinstance(value, Tensor):  # `loss += penalty` after `self.log("loss", loss)` must not change it
            kept = value.clone() if options.get("enable_graph") else value.detach().clone()
        self._calls[self.part].append(_Call(self.part, module, name, value, kept, options))

    def replay(self, sizes: Sequence[int], losses: ChunkLosses | None = None, loss: Tensor | None = None) -> None:
        """Call the root's metrics as the parts have, and log the recorded values on the root.

        `losses` are those of the parts with samples; `loss` is the batch's, or None for their mean.
        """
        used = [i for i, size in enumerate(sizes) if size > 0]

        def are_losses(values: Sequence[Any], parts: Sequence[int]) -> bool:
            return losses is not None and list(parts) == used and all(map(is_loss, values, losses.losses))

        def whole_loss(values: Sequence[Any], parts: Sequence[int]) -> Tensor | None:
            if losses is None or not are_losses(values, parts):
                return None
            return losses.combine(self._device).detach() if loss is None else loss

        self.losses, self._sizes = [], sizes
        self.metrics.replay(whole_loss)
        calls, self._calls = self._calls, []
        for same in grouped(calls, lambda call: (call.module, call.name)).values():
            first, kept, parts = same[0], [call.kept for call in same], [call.part for call in same]
            value, (weights, options) = known(first.kept), self._weighed(same)
            if isinstance(first.kept, (Tensor, int, float)) and not isinstance(first.value, NoValue):
                how = _HOW.get(first.options.get("reduce_fx"), "mean")
                if losses is not None and are_losses([call.value for call in same], parts):
                    weights, how = losses.weights, "mean"
                values = [one.reshape(()) if isinstance(one, Tensor) else one for one in kept]
                value, is_program = combine(values, weights, how, self._device), first.name in self._programs
                if losses is not None and weights is losses.weights and not is_program:
                    self.losses.append(value)
                is_mean = first.options.get("reduce_fx", "mean") == "mean" and isinstance(value, (Tensor, float))
                if is_program and is_mean and len(same) >= len(self._tapes):  # it makes the whole batch's value
                    value = self._values.noted(first.name, self._of_parts(first.name, parts, kept, value))
            self.modules[0][first.module].log(first.name, value, **options)

    def combine(self, outputs: list[Any], sizes: Sequence[int], structure: ResultStructure) -> Any:
        """Combine what `training_step` returned for each chunk that has samples, and log each recorded value once.

        Where it returned mappings, the batch's has what isn't the loss only if a hook of the user's reads it.
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
        trainer: Any = self._root.trainer
        own, result = ("loss", "loss_weight", FOUND), dict(outputs[0]) if len(outputs) == 1 else dict[str, Any]()
        if len(outputs) > 1 and hooked("on_train_batch_end", trainer, by_user=True):
            rest = [{key: value for key, value in output.items() if key not in own} for output in outputs]
            with torch.no_grad():
                joined = structure.join(rest, sizes, self._device)
            result = joined if isinstance(joined, dict) else dict.fromkeys(rest[0], joined)
        weights = dict.fromkeys(outputs[0].keys() & own[1:], losses.total(self._device))
        return {**result, **weights, "loss": loss}

    def _weighed(self, calls: list[_Call]) -> tuple[Sequence[Any], dict[str, Any]]:
        """The weight of each call in the value of the batch, and the options to log it with."""
        own = [self._sizes[call.part] for call in calls]
        given: list[Any] = [call.options.get("batch_size") for call in calls]
        options = calls[0].options
        if any(isinstance(number, (Tensor, float)) for number in given):  # counted, not a constant
            return given, options | {"batch_size": sum(given)}
        if None not in given:
            if self._values.reading(*self._step, calls[0].name) == "constant":
                return own, options
            return given if any(given) else own, options | {"batch_size": sum(given)}
        if len(calls) < sum(size > 0 for size in self._sizes):  # only some chunks logged it
            options = options | {"batch_size": sum(own)}
        return own, options

    def _of_parts(self, name: str, parts: Sequence[int], values: Sequence[Any], otherwise: Any) -> Tensor:
        """What a program makes of parts, if it makes their own values."""
        program = self._programs[name]
        rows = torch.stack([self._tapes[part].rows(program, self._device) for part in parts])
        self._values.calls[-1][0][name] = merged = program.merged(rows)
        own = [torch.as_tensor(value).to(self._device) for value in values]
        fits = torch.stack([program.fits(row, value) for row, value in zip(rows, own, strict=True)]).all()
        value = program.value(merged)
        return torch.where(fits, value, torch.as_tensor(otherwise).to(value))
