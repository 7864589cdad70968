"""Check that a loss is the mean over samples by which its parts are weighted.

In a run's first training step autograd's graph shows it for most losses, and costs no call of the module. Where it does
not, some samples do: the loss of all of them together is the mean of the losses of each. If it is not, the loss is
normalised by something else (atoms, tokens, weights of classes), or depends on which samples are together (a
contrastive loss).
"""

import itertools
import logging
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeAlias

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from typing_extensions import override

from ...core.errors import ConfigError
from ...core.patching import Replacement
from ...core.private import of_lightning, of_torch
from ...core.types import Batch
from ...core.untraced_step import trial_step
from ..evidence import fetch_singles, numbers_of_rows, tensors_in
from ..layout import Layout
from ..structure import num_samples
from ._data_flow import DataFlow
from ._loss_graph import read_loss

logger = logging.getLogger(__name__)

_SEEDS = (1, 2)
_SAME, _CLOSE, _FAR, _CLEAR = 1e-5, 1e-3, 0.02, 0.05
"""Differences as fractions of the largest: rounding on a CPU; of losses and of gradients on any device; no chance."""
_PAIRS = (
    "if it compares samples with one another (pairs, ranks, a variance over the batch), only strategy=dp and "
    "balanced_dp compute it on the whole batch, in training_step_end"
)
_MOST_ELEMENTS = 2**16
"""Of the parameters whose gradients are compared."""
_OTHERWISE = (
    "Or use strategy=single_device, or set strategy.verify_loss=false (fsdp has no such option) to weight it by "
    "samples nevertheless, which trains otherwise than one device."
)


class LossCheck:
    """Looks at the loss of a run's first training step.

    Args:
        strategy: name that begins messages.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._doubt: str | None = None
        self._uneven = ""
        self._flow: DataFlow | None = None

    @contextmanager
    def open(self, module: pl.LightningModule, layout: Layout, num: float | None = None) -> Generator[None]:
        """Have the layout show the losses of a training step inside the block, before their backward pass.

        Args:
            num: samples of this process's batch, where the layout does not count them.
        """
        self._doubt = None if module.automatic_optimization else ""
        layout.inspect = partial(self._inspect, module, num)
        if not module.automatic_optimization:  # whose backward pass and update are in the step
            yield
            return
        followed = Replacement(module, "training_step", self._follow)
        try:
            yield
        finally:
            followed.remove()

    def _follow(self, step: Callable[..., Any], batch: Batch, *args: Any, **kwargs: Any) -> Any:
        """Run the step of one part of the batch, and see what it does to its samples."""
        num = num_samples(batch) or 1
        if self._flow is not None or num < 2:
            return step(batch, *args, **kwargs)
        self._flow = DataFlow(tensors_in(batch), num)
        with self._flow:
            return step(batch, *args, **kwargs)

    def _inspect(self, module: pl.LightningModule, num: float | None, output: Any, size: float | None) -> None:
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, Tensor) and not (isinstance(output, dict) and output.get("loss_weight") is not None):
            doubt, uneven = read_loss(loss, int(size or num or 1), module)
            self._doubt, self._uneven = self._doubt or doubt, self._uneven or uneven
            if self._uneven and not module.automatic_optimization:  # which steps before it returns
                self._refuse_targets()

    def close(
        self, strategy: Any, num: float | None, args: Sequence[Any], options: Any,
        trial: Callable[[], AbstractContextManager[Any]] | None,
    ) -> str:  # fmt: skip
        """Refuse the loss that was shown if samples show that it is no mean over them.

        Args:
            strategy: that has run the step.
            num: samples of the batch; None if they don't count.
            args: of the training step.
            options: keyword arguments of the training step.
            trial: a context for each trial beside that of `trial_step`; None if this process can't try a loss alone.

        Returns:
            What to tell if nothing shows that it is one; empty if something does.

        Raises:
            ConfigError: the loss is not the mean over samples.
        """
        doubt, self._doubt, strategy.layout.inspect = self._doubt, None, None
        flow, self._flow = self._flow, None
        if doubt is None:
            return ""
        if self._uneven:
            self._refuse_targets()
        rows = set(numbers_of_rows(args[0])) if num else set[int]()
        if rows - {num}:
            doubt = f"a batch of {num:g} samples has tensors of {' and '.join(map(str, sorted(rows)))} rows"
        elif doubt:
            doubt = f"nothing shows that the loss is a mean over samples (it depends on {doubt})"
        elif flow is not None and flow.mixed_by:
            doubt = f"nothing shows that the loss is a mean over samples (it reads the batch mixed by {flow.mixed_by})"
        if trial is None or not (doubt or (flow is not None and flow.may_mix)):
            return doubt
        return "" if self._is_mean(strategy, args[1:], options, trial) else doubt

    def _refuse_targets(self) -> None:
        raise ConfigError(
            f"{self._strategy}: the loss is not the mean over samples, by which parts of a batch are weighted: it is "
            f"one over targets, and {self._uneven}, more of some samples than of others. With automatic optimization, "
            'return {"loss": loss, "loss_weight": n} from training_step, n being the number of targets that count or '
            f"the sum of their weights. {_OTHERWISE}"
        )

    def tell(self, doubt: str) -> None:
        """Warn that nothing shows that the loss is a mean over samples, unless something does."""
        if doubt:
            logger.warning(
                "%s: %s. The loss is weighted by samples; if it is a mean over something else (atoms, tokens), return "
                '{"loss": loss, "loss_weight": n} from training_step.', self._strategy, doubt,
            )  # fmt: skip

    def _is_mean(
        self, strategy: Any, rest: Sequence[Any], options: Any, trial: Callable[[], AbstractContextManager[Any]]
    ) -> bool:
        """Whether the module's loss is known to be the mean over samples; it is refused if it is known not to be."""
        module: pl.LightningModule = strategy.lightning_module
        loaders = of_lightning.flattened(of_lightning.combined_loader(module.trainer.fit_loop))
        if not module.automatic_optimization or len(loaders) != 1:
            return False

        def compute(batch: Batch, seed: int, read: Callable[[Tensor], Tensor]) -> Tensor:
            batch = of_lightning.on_before_batch_transfer(module)(strategy.precision_plugin.convert_input(batch), 0)
            batch = of_lightning.apply_batch_transfer_handler(module)(batch, device=strategy.root_device)
            with trial_step(module), trial(), torch.random.fork_rng():
                torch.manual_seed(seed)
                output: Any = module.training_step(batch, *rest, **options)
                loss: Tensor = output["loss"] if isinstance(output, dict) else output
                if torch.finfo(loss.dtype).eps > _CLOSE:
                    raise RuntimeError(f"{loss.dtype} rounds too much to compare losses")
                return read(loss)

        return verify_mean(compute, loaders[0], self._strategy, _small_parameters(module))


_Compute: TypeAlias = Callable[[Batch, int, Callable[[Tensor], Tensor]], Tensor]
"""Computes the loss of a batch with a seed, reads something of it, and leaves no trace."""


def verify_mean(compute: _Compute, loader: Any, strategy: str, parameters: Sequence[nn.Parameter] = ()) -> bool:
    """Refuse a loss that is not the mean over samples.

    Args:
        compute: computes the loss of a batch with a seed, returns what the function that it gets reads of the loss, and
            leaves no trace.
        loader: its samples are used.
        strategy: name that begins messages.
        parameters: of the module. Where all samples have nearly the same loss, its gradients are compared.

    Returns:
        Whether it is known to be one. It is not where samples can't be chosen, where the loss draws random numbers,
        or where it or its gradient differs from the mean by what rounding may be.

    Raises:
        ConfigError: it is not the mean over samples.
    """
    try:  # arbitrary code, in evaluation mode: what fails here shows nothing, as a collective does
        verdict = _by_losses(compute, loader)
        if verdict is None and parameters:
            verdict = _by_gradients(compute, loader, parameters)
    except Exception:  # noqa: BLE001  # see above
        return False
    if verdict:
        raise ConfigError(
            f"{strategy}: the loss is not the mean over samples, by which parts of a batch are weighted: {verdict}. "
            "If it is a mean over something else (atoms, tokens, weights of classes), return "
            f'{{"loss": loss, "loss_weight": n}} from training_step. {_OTHERWISE}'
        )
    return verdict is not None


def _by_losses(compute: _Compute, loader: Any) -> str | None:
    """What losses of samples show: how they differ from a mean; empty if they are one; None if neither."""
    *single, together = first = [float(loss) for loss in _tried(compute, loader, _SEEDS[0], Tensor.detach)]
    largest, gap, mean = max(map(abs, first)), max(single) - min(single), sum(single) / len(single)
    if not math.isfinite(together) or abs(together - mean) <= _CLOSE * (largest + gap):
        return "" if gap > _CLEAR * largest and abs(together - mean) <= _SAME * (largest + gap) else None
    again = [float(loss) for loss in _tried(compute, loader, _SEEDS[1], Tensor.detach)]
    if any(a != b and abs(a - b) > _CLOSE * largest for a, b in zip(first, again, strict=True)):
        return None
    if not math.isfinite(mean):
        return f"of a sample alone it is undefined ({mean:.4g}), and of {len(single)} together {together:.4g}; {_PAIRS}"
    if len(set(single)) == 1:
        return f"of each of {len(single)} samples alone it is {mean:.4g}, and of all together {together:.4g}; {_PAIRS}"
    return (
        f"the mean of the losses of {len(single)} samples, each computed alone, is {mean:.4g}, and the loss of all "
        f"together {together:.4g}"
    )


def _by_gradients(compute: _Compute, loader: Any, parameters: Sequence[nn.Parameter]) -> str | None:
    """What the gradients of samples' losses show; see `_by_losses`."""

    def gradient(loss: Tensor) -> Tensor:
        if torch.is_autocast_enabled(loss.device.type):
            raise RuntimeError("autocast rounds too much to compare gradients")
        found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([one.flatten().double().cpu() for one in found])

    *single, together = first = _tried(compute, loader, _SEEDS[0], gradient)
    mean = torch.stack(single).mean(0)
    largest, gap = max(float(one.norm()) for one in single), max(float((one - mean).norm()) for one in single)
    difference = float((together - mean).norm())
    if not difference > _FAR * largest:
        return "" if gap > _CLEAR * largest and difference <= _SAME * largest else None
    again = _tried(compute, loader, _SEEDS[1], gradient)
    if any(float((a - b).norm()) > _CLOSE * largest for a, b in zip(first, again, strict=True)):
        return None
    return (
        f"the losses of {len(single)} samples are nearly alike, but the gradient of the loss of all together differs "
        f"from the mean of their gradients by {difference / largest:.0%} of the largest"
    )


def _small_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Some of the parameters that are trained, the smallest first; those with hooks may have another gradient."""
    trained = [p for p in module.parameters() if p.requires_grad and not of_torch.backward_hooks(p)]
    trained.sort(key=nn.Parameter.numel)
    sums = itertools.accumulate(p.numel() for p in trained)
    return [p for i, (p, total) in enumerate(zip(trained, sums, strict=True)) if not i or total <= _MOST_ELEMENTS]


def _tried(compute: _Compute, loader: Any, seed: int, read: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """What is read of the losses of some samples, each alone, and of the loss of all together."""
    with of_torch.not_compiling(), _OneRank():
        return [compute(batch, seed, read) for batch in fetch_singles(loader, seed)]


class _OneRank(of_torch.TorchDispatchMode):
    """Refuses collectives: the other ranks, whose batches may show nothing, need not try the loss, too."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError("a rank that tries its loss alone can't communicate")
        return func(*args, **(kwargs or {}))
