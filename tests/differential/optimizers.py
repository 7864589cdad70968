"""Optimizers and schedulers by name, among them some that call the closure in unusual ways."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class Sam(torch.optim.SGD):
    """Sharpness-aware minimisation: a second closure at weights that are moved through `p.data`."""

    inplace = False

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        old = [p.data.clone() for p in own]
        self._move(own)
        with torch.enable_grad():
            closure()
        self._restore(own, old)
        super().step()
        return loss

    @torch.no_grad()
    def _move(self, own: list[nn.Parameter]) -> None:
        for p in own:
            (p if self.inplace else p.data).add_(p.grad, alpha=0.5)

    @torch.no_grad()
    def _restore(self, own: list[nn.Parameter], old: list[torch.Tensor]) -> None:
        for p, value in zip(own, old, strict=True):
            (p if self.inplace else p.data).copy_(value)


class SamInPlace(Sam):
    """The same, writing the parameters themselves under no_grad."""

    inplace = True


class SamAssigned(Sam):
    """The same, putting another tensor in the place of `p.data`."""

    def _move(self, own: list[nn.Parameter]) -> None:
        for p in own:
            p.data = p.data + 0.5 * p.grad

    def _restore(self, own: list[nn.Parameter], old: list[torch.Tensor]) -> None:
        for p, value in zip(own, old, strict=True):
            p.data = value


class Twice(torch.optim.SGD):
    """Calls the closure twice, with a step of its own in between, as extra-gradient methods do."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        super().step()
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


class Lookahead(Optimizer):
    """An optimizer around another: every second step the weights go half way back."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        self.inner = torch.optim.SGD(params, lr, momentum=0.9)
        super().__init__(self.inner.param_groups, {"lr": lr})
        self.param_groups = self.inner.param_groups
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.count += 1
        own = [p for group in self.param_groups for p in group["params"]]
        if self.count % 2 == 0:
            for p, slow in zip(own, self.slow, strict=True):
                slow.add_(0.5 * (p.data - slow))
                p.data.copy_(slow)
        return loss


class NoClosureOnOdd(torch.optim.SGD):
    """Skips the closure in every second step."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure) if self.count % 2 else None


def _lbfgs(params: Any, **more: Any) -> Optimizer:
    return torch.optim.LBFGS(params, lr=0.1, max_iter=3, **more)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "maximize": partial(torch.optim.SGD, lr=0.01, maximize=True),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adamw_fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adam_foreach": partial(torch.optim.Adam, lr=0.01, foreach=True),
    "adam_tensor_lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01)),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "adamax": partial(torch.optim.Adamax, lr=0.01),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "asgd": partial(torch.optim.ASGD, lr=0.1, t0=2),
    "adafactor": partial(torch.optim.Adafactor, lr=0.01),
    "lbfgs": _lbfgs,
    "lbfgs_wolfe": partial(_lbfgs, line_search_fn="strong_wolfe"),
    "sam": partial(Sam, lr=0.1),
    "sam_in_place": partial(SamInPlace, lr=0.1),
    "sam_assigned": partial(SamAssigned, lr=0.1),
    "twice": partial(Twice, lr=0.05),
    "lookahead": partial(Lookahead, lr=0.05),
    "odd_closure": partial(NoClosureOnOdd, lr=0.1),
}
MANUAL = (
    "manual",
    "manual_two",
    "manual_toggle",
    "manual_accumulating",
    "manual_own_clipping",
    "manual_plain_backward",
)
SPECIAL = ("groups", "groups_late", "half")
SCHEDULERS = ("none", "step", "epoch", "lambda", "every_two_steps", "plateau_train", "plateau_val", "one_cycle",
              "cosine",
              "two", "custom_step")  # fmt: skip


def configure(module: Any, optimizer: str, scheduler: str) -> Any:
    """What `configure_optimizers` returns."""
    params = [p for p in module.parameters() if p.requires_grad or "frees" in module.case.net.peculiar]
    if optimizer in MANUAL:
        cut = len(params) // 2
        two = [torch.optim.SGD(params[:cut], 0.1), torch.optim.Adam(params[cut:], 0.01)]
        return two if optimizer not in ("manual", "manual_plain_backward") else torch.optim.SGD(params, 0.1)
    if optimizer in SPECIAL:
        cut = len(params) // 2
        groups = [{"params": params[:cut], "lr": 0.2}, {"params": params[cut:], "weight_decay": 0.1}]
        made: Optimizer = torch.optim.SGD(params[:cut] if optimizer == "half" else groups, lr=0.05)
    else:
        made = OPTIMIZERS[optimizer](params)
    if scheduler == "none":
        return made
    if scheduler == "two":
        return [made], [_scheduler(module, made, "step"), _scheduler(module, made, "epoch")]
    return {"optimizer": made, "lr_scheduler": _scheduler(module, made, scheduler)}


def _scheduler(module: Any, optimizer: Optimizer, name: str) -> dict[str, Any]:
    lrs = torch.optim.lr_scheduler
    plateau = partial(lrs.ReduceLROnPlateau, optimizer, factor=0.5, patience=0, threshold=0.05)
    return {
        "step": lambda: {"scheduler": lrs.StepLR(optimizer, 2, 0.5), "interval": "step"},
        "epoch": lambda: {"scheduler": lrs.ExponentialLR(optimizer, 0.5)},
        "lambda": lambda: {"scheduler": lrs.LambdaLR(optimizer, lambda e: 1 / (1 + e)), "interval": "step"},
        "every_two_steps": lambda: {"scheduler": lrs.StepLR(optimizer, 1, 0.5), "interval": "step", "frequency": 2},
        "plateau_train": lambda: {"scheduler": plateau(), "monitor": "step_loss", "interval": "step"},
        "plateau_val": lambda: {"scheduler": plateau(), "monitor": "val_monitor"},
        "one_cycle": lambda: {
            "scheduler": lrs.OneCycleLR(
                optimizer, 0.1, max(2, int(module.trainer.estimated_stepping_batches)), cycle_momentum=False
            ),
            "interval": "step",
        },
        "cosine": lambda: {"scheduler": lrs.CosineAnnealingWarmRestarts(optimizer, 2), "interval": "step"},
        "custom_step": lambda: {"scheduler": lrs.StepLR(optimizer, 2, 0.5), "interval": "step"},
    }[name]()
