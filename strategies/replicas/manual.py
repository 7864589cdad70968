"""Manual optimization on replicas: each runs the step on its chunk, and what changes the weights is done once for all.

`manual_backward` goes backward on the losses weighted by samples, and sums the gradients on the root. The step of an
optimizer or a scheduler, `toggle_optimizer` and `clip_gradients` act on the root; then the replicas get its weights,
and its choice of parameters that are trained. `zero_grad` acts on the root however often it is called.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from ..batch.exact.loss_reader import LossReader
from ..batch.exact.values import active_tape
from ..batch.losses import chunk_losses
from ..batch.whole.meeting import Seat, seat
from ..core.errors import ConfigError
from ..core.patching import Replacement, replaced

_ONCE = ("toggle_optimizer", "untoggle_optimizer", "clip_gradients")


class ManualSteps:
    """Stands between a module, on replicas, and what its steps change, until `close`.

    Args:
        trainer: of a module in manual optimization, whose optimizers are made.
        strategy: name that begins messages.
        device: the root's.
    """

    def __init__(self, trainer: pl.Trainer, strategy: str, device: torch.device) -> None:
        module = trainer.lightning_module
        self._strategy, self._device = strategy, device
        self._replicas: Sequence[nn.Module] = ()
        self.reader = LossReader(strategy)
        self._follow: Callable[[Sequence[Tensor]], None] = lambda _: None
        self._goes_backward = False
        self._methods = {name: Replacement(module, name, partial(self._once, name)) for name in _ONCE}
        self._methods["manual_backward"] = Replacement(module, "manual_backward", self._backward)
        optimizers = trainer.strategy._lightning_optimizers
        self._steps = [Replacement(optimizer, "step", partial(self._step, optimizer)) for optimizer in optimizers]
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._steps += [Replacement(scheduler, "step", self._schedule) for scheduler in schedulers]
        self._guards = [optimizer.register_step_pre_hook(self._verify_met) for optimizer in trainer.optimizers]

    def attend(self, replicas: Sequence[nn.Module], follow: Callable[[Sequence[Tensor]], None]) -> None:
        """Have the replicas of the next step, the root first, meet; `follow` gives them the root's weights."""
        self._replicas, self._follow = replicas, follow
        for replica in replicas[1:]:
            vars(replica).update(self._methods)

    def close(self) -> None:
        """Restore the methods."""
        for replacement in (*self._steps[::-1], *self._methods.values()):
            replacement.remove()
        for guard in self._guards:
            guard.remove()

    def _once(self, name: str, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        here = seat()
        if not isinstance(here, Seat):
            return own(*args, **kwargs)
        return here.meet(name, None, partial(self._done_once, partial(own, *args, **kwargs)))

    def _done_once(
        self, call: Callable[[], Any], brought: Mapping[int, Any], updated: Sequence[Tensor] = ()
    ) -> Mapping[int, Any]:
        result = call()
        self._follow(updated)
        return dict.fromkeys(brought, result)

    def _backward(self, own: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> None:
        here = seat()
        if not isinstance(here, Seat):
            own(loss, *args, **kwargs)
            return
        if args or kwargs.keys() - {"retain_graph", "create_graph"}:
            raise ConfigError(
                f"{self._strategy}: manual_backward takes retain_graph and create_graph on replicas, and was given "
                f"{[*map(type, args), *kwargs]}. Leave them out, or use strategy=ddp."
            )
        combine = partial(self._combined, partial(own, **kwargs), here.num_samples)
        here.meet("manual_backward", (loss, active_tape()), combine)

    def _combined(
        self, own: Callable[..., Any], sizes: Sequence[float], brought: Mapping[int, tuple[Tensor, Any]]
    ) -> Mapping[int, Any]:
        used, (losses, tapes) = [int(sizes[part]) for part in brought], zip(*brought.values(), strict=True)
        losses = self.reader.weighed(losses, used, tapes)
        loss = chunk_losses(losses, used, self._strategy).combine(self._device)
        with replaced(self, "_goes_backward", True):
            return self._done_once(partial(own, loss), brought)

    def _step(
        self, optimizer: Any, own: Callable[..., Any], closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        here = seat()
        if not isinstance(here, Seat):
            return own(closure, **kwargs)
        result = None
        if closure is not None:
            self._verify_closure(optimizer)
            result = closure()  # in which the parts meet; an optimizer calls it before it does anything else
        if any(p.grad is not None for replica in self._replicas[1:] for p in replica.parameters()):
            self._refuse_gradients()
        updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        here.meet("optimizer.step", None, partial(self._done_once, partial(own, **kwargs), updated=updated))
        return result

    def _schedule(self, own: Callable[..., Any], *args: Any) -> None:
        here = seat()
        if not isinstance(here, Seat):
            own(*args)
            return

        def combine(brought: Mapping[int, Any]) -> Mapping[int, Any]:
            given, sizes = list(brought.values()), [here.num_samples[part] for part in brought]
            means = [_mean(values, sizes) for values in zip(*given, strict=True)]
            return self._done_once(partial(own, *means), brought)

        here.meet("lr_scheduler.step", args, combine)

    def _verify_met(self, optimizer: Optimizer, *_: Any) -> None:
        if isinstance(seat(), Seat):
            raise ConfigError(
                f"{self._strategy}: a replica has stepped {type(optimizer).__name__} itself. Step what "
                "self.optimizers() returns, without use_pl_optimizer=False, so that all replicas step it once."
            )

    def _verify_closure(self, optimizer: Optimizer | LightningOptimizer) -> None:
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if isinstance(plain, LBFGS) or not type(plain).__module__.startswith("torch.optim"):
            raise ConfigError(
                f"{self._strategy}: {type(plain).__name__} may call its closure several times, with other weights each "
                "time, which replicas can't. Call manual_backward, then step() without a closure, or use strategy=ddp."
            )

    def goes_backward(self) -> bool:
        """Whether replicas go backward together."""
        if not self._goes_backward:
            self._refuse_gradients()
        return True

    def _refuse_gradients(self) -> None:
        raise ConfigError(
            f"{self._strategy}: a replica has gradients of its own, of loss.backward(). Call "
            "self.manual_backward(loss), which sums those of all replicas."
        )


def _mean(values: Sequence[Any], sizes: Sequence[float]) -> Any:
    """The mean over samples of what parts gave to a scheduler, or what all have given."""
    if not all(isinstance(value, (float, Tensor)) for value in values):
        return values[0]
    return sum(float(value) * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)
