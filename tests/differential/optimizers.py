"""Optimizers and schedulers by name, among them some that call the closure in unusual ways."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class Sam(torch.optim.SGD):
    """Sharpness-aware minimisation: a second closure at weights that `write` has moved."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, write: Callable[..., Any]) -> None:
        super().__init__(params, lr)
        self.write = write

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        old = [p.data.clone() for p in own]
        for p in own:
            self.write(p, p.data + 0.5 * p.grad)
        with torch.enable_grad():
            closure()
        for p, value in zip(own, old, strict=True):
            self.write(p, value)
        super().step()
        return loss


class Twice(torch.optim.SGD):
    """Calls the closure twice, with a step of its own in between, as extra-gradient methods do."""

    def step(self, closure: Any = None) -> Any:
        for _ in range(2):
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
    "sam": partial(Sam, lr=0.1, write=lambda p, value: p.data.copy_(value)),
    "sam_in_place": partial(Sam, lr=0.1, write=torch.no_grad()(lambda p, value: p.copy_(value))),
    "sam_assigned": partial(Sam, lr=0.1, write=lambda p, value: setattr(p, "data", value)),
    "twice": partial(Twice, lr=0.05),
    "lookahead": partial(Lookahead, lr=0.05),
    "odd_closure": partial(NoClosureOnOdd, lr=0.1),
}
MANUAL = ("manual", "manual_two", "manual_toggle", "manual_accumulating", "manual_own_clipping",
          "manual_plain_backward")  # fmt: skip
SPECIAL = ("groups", "groups_late", "half")


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
        return [made], [_scheduler(module, made, "two"), _scheduler(module, made, "epoch")]
    return {"optimizer": made, "lr_scheduler": _scheduler(module, made, scheduler)}


def _scheduler(module: Any, optimizer: Optimizer, name: str) -> dict[str, Any]:
    make, options = _SCHEDULERS[name]
    if name == "one_cycle":
        make = partial(make, total_steps=max(2, int(module.trainer.estimated_stepping_batches)))
    return {"scheduler": make(optimizer), **options}


_lrs = torch.optim.lr_scheduler
_plateau = partial(_lrs.ReduceLROnPlateau, factor=0.5, patience=0, threshold=0.05)
_by_step = {"interval": "step"}
_SCHEDULERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "step": (partial(_lrs.StepLR, step_size=2, gamma=0.5), _by_step),
    "epoch": (partial(_lrs.ExponentialLR, gamma=0.5), {}),
    "lambda": (partial(_lrs.LambdaLR, lr_lambda=lambda e: 1 / (1 + e)), _by_step),
    "every_two_steps": (partial(_lrs.StepLR, step_size=1, gamma=0.5), {**_by_step, "frequency": 2}),
    "plateau_train": (_plateau, {**_by_step, "monitor": "step_loss"}),
    "plateau_val": (_plateau, {"monitor": "val_monitor"}),
    "one_cycle": (partial(_lrs.OneCycleLR, max_lr=0.1, cycle_momentum=False), _by_step),
    "cosine": (partial(_lrs.CosineAnnealingWarmRestarts, T_0=2), _by_step),
    "two": (partial(_lrs.StepLR, step_size=2, gamma=0.5), _by_step),
    "custom_step": (partial(_lrs.StepLR, step_size=2, gamma=0.5), _by_step),
}
SCHEDULERS = ("none", *_SCHEDULERS)
