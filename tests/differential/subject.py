"""The module of a case."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .batches import term, unpack
from .loading import is_paired
from .metering import METRICS, arguments, make_metrics, make_tracker
from .optimizers import MANUAL, configure

if TYPE_CHECKING:
    from .cases import Case, Log

NETS = ("mlp", "tied", "shared", "norm", "deep", "nested", "residual")
PECULIAR = (
    "teacher", "hook_counter", "schedule", "grad_penalty", "checkpointing", "weight_norm", "param_list", "frozen",
    "frees", "buffer_ema", "buffer_in_loss", "sparse", "experts", "unused", "hparams", "skips_a_batch", "no_batch_idx",
    "edits_gradients", "own_clipping", "own_optimizer_step", "configure_model", "param_hook", "to_in_step",
    "no_grad_part",
    "collects_predictions", "collects_losses", "collects_train_losses", "batch_idx_in_loss",
    "own_transfer", "moves_batch", "global_step", "sets_attribute", "recurrent", "forward_kwargs", "logs_in_hooks",
    "tracker", "frozen_batchnorm", "logs_twice",
)  # fmt: skip
HOOKS = ("none", "init_features", "each_step", "first_step", "changes_output", "pre", "backward", "always", "kwargs",
         "removed_later", "on_submodule_of_children")  # fmt: skip


class Residual(nn.Module):
    """A block that adds what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def make_net(kind: str) -> nn.Sequential:
    """Four features in, three classes out."""
    first, last = nn.Linear(4, 8), nn.Linear(8, 3)
    shared = nn.Linear(8, 8)
    inner: list[nn.Module] = {
        "mlp": [],
        "tied": [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)],
        "shared": [shared, nn.Tanh(), shared],
        "norm": [nn.LayerNorm(8), nn.Linear(8, 8), nn.GroupNorm(2, 8)],
        "deep": [nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Softplus()],
        "nested": [nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8)))],
        "residual": [Residual(), Residual()],
    }[kind]
    net = nn.Sequential(first, nn.Tanh(), *inner, last)
    if kind == "tied":
        net[4].weight = net[2].weight
    return net


class Subject(pl.LightningModule):
    """A classifier with the peculiarities of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.peculiar = case, case.net.peculiar
        if "hparams" in self.peculiar:
            self.save_hyperparameters({"batch_size": case.loading.batch_size})
        self.automatic_optimization = case.optimization.optimizer not in MANUAL
        if "configure_model" not in self.peculiar:
            self.make_layers()
        self.logs = {where: [log for log in case.logs if log.where == where] for where in ("train", "eval")}
        self.train_metrics, self.val_metrics = (make_metrics(self.logs[where]) for where in ("train", "eval"))
        self.test_metrics = copy.deepcopy(self.val_metrics)
        if "tracker" in self.peculiar:
            self.tracker = make_tracker()
        self.count = 0
        self.handle: Any = None
        self.features: list[Tensor] = []
        self.collected: list[Tensor] = []
        self.gradients_of_hook: list[Tensor] = []

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.make_layers()

    def make_layers(self) -> None:
        peculiar = self.peculiar
        self.net = net = make_net(self.case.net.kind)
        if "frozen" in peculiar or "frees" in peculiar:
            net[0].requires_grad_(False)
        if "weight_norm" in peculiar:
            nn.utils.parametrizations.weight_norm(net[0])
        if "teacher" in peculiar:
            self.teacher = copy.deepcopy(net).requires_grad_(False)
        if "param_list" in peculiar:
            self.scales = nn.ParameterList([nn.Parameter(torch.full((3,), 1.0 + i)) for i in range(2)])
            self.table = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(3))})
        if "sparse" in peculiar:
            self.embedding = nn.Embedding(3, 3, sparse=True)
        if "experts" in peculiar:
            self.experts = nn.ModuleList([nn.Linear(4, 3) for _ in range(3)])
        if "unused" in peculiar:
            self.unused = nn.Linear(2, 2)
        if "frozen_batchnorm" in peculiar:
            self.norm = nn.BatchNorm1d(3)
        if "recurrent" in peculiar:
            self.gru = nn.GRU(1, 3, batch_first=True)
        if "buffer_ema" in peculiar or "buffer_in_loss" in peculiar:
            self.register_buffer("average", torch.full((3,), 0.5))
            self.register_buffer("count_of_batches", torch.tensor(1), persistent=False)
        if "param_hook" in peculiar:
            net[0].weight.register_hook(lambda grad: grad * 2)
        self.register_hooks()

    def register_hooks(self) -> None:
        """Those that are there from the start."""
        kind, layer = self.case.net.hooks, self.net[0]
        if kind == "init_features":
            layer.register_forward_hook(lambda module, args, output: self.keep(output))
        if kind == "on_submodule_of_children":
            for child in self.net.children():
                child.register_forward_hook(lambda module, args, output: self.keep(output.mean(1, keepdim=True)))
        if kind == "changes_output":
            layer.register_forward_hook(lambda module, args, output: output * 2)
        if kind == "pre":
            layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        if kind == "kwargs":
            self.net.register_forward_hook(
                lambda module, args, kwargs, output: output + len(kwargs), with_kwargs=True, always_call=True
            )
        if kind == "backward":
            layer.register_full_backward_hook(lambda module, grads, outputs: None)
            self.net[-1].register_full_backward_hook(lambda module, grads, outputs: tuple(2 * g for g in grads))
        if kind == "always":
            layer.register_forward_hook(lambda module, args, output: output.sin(), always_call=True, prepend=True)
            layer.register_forward_hook(lambda module, args, output: output * 3)

    def keep(self, output: Tensor) -> None:
        self.features.append(output)

    def begin_features(self) -> None:
        kind = self.case.net.hooks
        self.features = []
        if kind == "each_step":
            own = self.features
            self.handle = self.net[0].register_forward_hook(lambda module, args, output: own.append(output))
        if kind in ("first_step", "removed_later") and self.handle is None:
            self.handle = self.net[0].register_forward_hook(lambda module, args, output: self.keep(output))

    def end_features(self) -> Tensor | int:
        if self.case.net.hooks == "each_step":
            self.handle.remove()
        found = sum(feature.square().mean(1) for feature in self.features)
        self.features = []
        return found

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        if "checkpointing" in self.peculiar and self.training:
            hidden = checkpoint(self.net[0], x, use_reentrant=False)
            logits = self.net[1:](hidden)
        else:
            logits = self.net(x)
        if "param_list" in self.peculiar:
            logits = logits * self.scales[0] * self.scales[1] + self.table["bias"]
        if "recurrent" in self.peculiar:
            logits = logits + self.gru(x.unsqueeze(-1))[0][:, -1]
        if "frozen_batchnorm" in self.peculiar:
            logits = self.norm(logits)
        return logits + shift

    def losses(self, batch: Any, batch_idx: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, targets, and a loss per sample."""
        fields = unpack(self.case.batches, batch)
        x, y = fields["x"], fields["y"]
        if "to_in_step" in self.peculiar:
            x = x.to(self.device)
        if "grad_penalty" in self.peculiar and torch.is_grad_enabled():
            x = x.detach().requires_grad_(True)
        self.begin_features()
        logits = self(x, shift=0.5) if "forward_kwargs" in self.peculiar else self(x)
        losses = nn.functional.cross_entropy(logits, y, reduction="none")
        losses = losses + self.end_features()
        for kind in self.case.batches.extras:
            losses = losses + 0.3 * term(kind, fields[kind], logits, self.net)
        if self.case.batches.shape == "zip":
            losses = losses + 0.3 * term("boxes", fields["boxes"], logits, self.net)
        return logits, y, losses + self.peculiar_losses(x, y, logits, losses, batch_idx)

    def peculiar_losses(self, x: Tensor, y: Tensor, logits: Tensor, losses: Tensor, batch_idx: int) -> Tensor:
        peculiar, more = self.peculiar, 0.0 * losses
        if "teacher" in peculiar:
            more = more + (logits - self.teacher(x)).square().mean(1)
        numbers = {
            "hook_counter": self.count, "schedule": self.current_epoch, "global_step": self.trainer.global_step,
            "batch_idx_in_loss": batch_idx,
        }  # fmt: skip
        for number in [number for name, number in numbers.items() if name in peculiar]:
            more = more + losses * 0.1 * number
        if "grad_penalty" in peculiar and torch.is_grad_enabled():
            grads = torch.autograd.grad(logits.sum(), x, create_graph=True)[0]
            more = more + grads.square().sum(1)
        if "sparse" in peculiar:
            more = more + (self.embedding(y) * logits).sum(1)
        if "experts" in peculiar:
            for i, expert in enumerate(self.experts):
                own = y == i
                if own.any():
                    more = more.index_add(0, own.nonzero().flatten(), expert(x[own]).square().mean(1))
        if "buffer_in_loss" in peculiar or "buffer_ema" in peculiar:
            more = more + (logits * self.average).sum(1) * self.count_of_batches
        if "no_grad_part" in peculiar:
            with torch.no_grad():
                weight = self.net(x).softmax(1).amax(1)
            more = more + losses * weight
        if "sets_attribute" in peculiar:
            self.last_logits = logits.detach()
            more = more + self.last_logits.square().mean(1) * losses
        return more

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        if "skips_a_batch" in self.peculiar and batch_idx == 1:
            return None
        parts = self.parts(batch, batch_idx, True)
        if not self.automatic_optimization:
            return self.manual_step(parts, batch_idx)
        logits, y, losses = parts[0]
        loss = self.reduced(losses, y)
        for _, _, more in parts[1:]:
            loss = loss + more.mean()
        self.log("step_loss", loss.detach(), on_step=True, on_epoch=True, sync_dist=True, batch_size=len(y))
        for factor in (1, 2) if "logs_twice" in self.peculiar else ():
            self.log("twice", losses.mean() * factor, on_step=False, on_epoch=True, sync_dist=True)
        self.log_all("train", logits, y, losses)
        if "collects_train_losses" in self.peculiar:
            self.collected.append(losses.detach())
        return TRAIN_OUTPUTS[self.case.returns.train](loss, logits, y, losses.detach())

    def parts(self, batch: Any, batch_idx: int, training: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
        """What `losses` gives, for each of several loaders."""
        if not is_paired(self.case.loading, training):
            return [self.losses(batch, batch_idx)]
        batches = list(batch.values()) if isinstance(batch, dict) else list(batch)
        return [self.losses(one, batch_idx) for one in batches if one is not None]

    def reduced(self, losses: Tensor, y: Tensor) -> Tensor:
        if self.case.returns.train == "sum":
            return losses.sum() / 4
        if "weight" not in self.case.returns.train:
            return losses.mean()
        weights = 1.0 + y
        return (losses * weights).sum() / weights.sum()

    def manual_step(self, parts: Any, batch_idx: int) -> None:
        """One backward pass and one step per optimizer."""
        kind, found = self.case.optimization.optimizer, self.optimizers()
        optimizers = found if isinstance(found, list) else [found]
        logits, y, losses = parts[0]
        loss = losses.mean()
        self.log_all("train", logits, y, losses)
        if kind == "manual_accumulating":
            self.manual_backward(loss / 2)
            if batch_idx % 2:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            return
        for i, optimizer in enumerate(optimizers):
            if kind == "manual_toggle":
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            if kind == "manual_plain_backward":  # which no rank averages
                loss.backward()
            else:
                self.manual_backward(loss, retain_graph=i + 1 < len(optimizers))
            if kind == "manual_own_clipping":
                nn.utils.clip_grad_norm_(self.parameters(), 0.2)
            elif self.case.options.gradient_clip_val is None:
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            if kind == "manual_toggle":
                self.untoggle_optimizer(optimizer)
        for optimizer in optimizers:
            optimizer.step()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.evaluate(batch, batch_idx, "val")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.evaluate(batch, batch_idx, "test")

    def evaluate(self, batch: Any, batch_idx: int, name: str) -> Any:
        found = self.parts(batch, batch_idx, False)
        logits, y, losses = found[0] if len(found) == 1 else [torch.cat(one) for one in zip(*found, strict=True)]
        self.log(f"{name}_monitor", losses.mean(), sync_dist=True, batch_size=len(y))
        self.log_all(name, logits, y, losses)
        if "tracker" in self.peculiar and name == "val":
            self.tracker.update(logits.softmax(-1), y)
        if "collects_predictions" in self.peculiar:
            self.collected.append(logits.argmax(1) == y)
        if "collects_losses" in self.peculiar:
            self.collected.append(losses.mean())
        return EVAL_OUTPUTS[self.case.returns.evaluation](logits, y, losses)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = torch.cat([one[0] for one in self.parts(batch, batch_idx, False)])
        return PREDICTIONS[self.case.returns.predict](logits, logits.argmax(1))

    def log_all(self, stage: str, logits: Tensor, y: Tensor, losses: Tensor) -> None:
        for name, log, metric in self.logged(stage):
            self.log_one(name, log, metric, logits.detach(), y, losses.detach())

    def logged(self, stage: str) -> list[tuple[str, Log, Any]]:
        """Name, call and metric of each call of `self.log` in a stage."""
        logs = enumerate(self.logs["train" if stage == "train" else "eval"])
        return [(f"{stage}_{i}_{log.value}", log, getattr(self, f"{stage}_metrics")[i]) for i, log in logs]

    def log_one(self, name: str, log: Log, metric: Any, logits: Tensor, y: Tensor, losses: Tensor) -> None:
        options: dict[str, Any] = {
            "on_step": log.on_step, "on_epoch": log.on_epoch, "sync_dist": log.sync_dist, "prog_bar": log.prog_bar
        }  # fmt: skip
        size = {"none": None, "true": len(y), "constant": self.case.loading.batch_size, "one": 1}[log.batch_size]
        options["batch_size"] = size
        if log.value in METRICS:
            given = arguments(log.value, logits, y, losses)
            if log.style in ("update", "epoch_end", "epoch_start_reset"):
                metric.update(*given)
                if log.style != "update":
                    return
                value = metric
            else:
                value = metric(*given)
                value = metric if log.style == "object" else value
            if isinstance(value, dict) or type(value).__name__ == "MetricCollection":
                self.log_dict(value, **options)
                return
        else:
            value, options["reduce_fx"] = LOGGED[log.value](self, logits, y, losses)
        if log.as_dict:
            self.log_dict({name: value, f"{name}_again": value}, **options)
        else:
            self.log(name, value, **options)

    def log_at_end(self, stage: str) -> None:
        for name, log, metric in self.logged(stage):
            if log.value not in METRICS or log.style not in ("epoch_end", "epoch_start_reset"):
                continue
            value = metric.compute()
            values = value if isinstance(value, dict) else {name: value}
            self.log_dict({f"{key}_end": one for key, one in values.items()})
            metric.reset()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.count += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.case.net.hooks == "removed_later" and batch_idx == 1 and self.handle is not None:
            self.handle.remove()
        if "teacher" in self.peculiar:
            for own, slow in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
                slow.data.mul_(0.9).add_(own.data, alpha=0.1)
        if "logs_in_hooks" in self.peculiar:
            self.log("weight", self.net[-1].weight.norm())
        if "buffer_ema" in self.peculiar:
            self.average.mul_(0.9).add_(self.net[-1].bias.detach(), alpha=0.1)
            self.count_of_batches += 1

    def on_train_epoch_start(self) -> None:
        if "frozen_batchnorm" in self.peculiar:
            self.norm.eval()
        if "frees" in self.peculiar and self.current_epoch == 1:
            self.net[0].requires_grad_(True)
        if "collects_train_losses" in self.peculiar:
            self.collected = []

    def on_train_epoch_end(self) -> None:
        self.log_at_end("train")
        if "collects_train_losses" in self.peculiar and self.collected:
            self.log("collected", torch.cat(self.collected).mean())

    def on_validation_epoch_start(self) -> None:
        if "tracker" in self.peculiar:
            self.tracker.increment()
        if "collects_train_losses" not in self.peculiar:
            self.collected.clear()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if "logs_in_hooks" in self.peculiar:
            norms = [p.grad.norm() for p in self.net.parameters() if p.grad is not None]
            self.log("gradient_norm", torch.stack(norms).norm(), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        if "tracker" in self.peculiar:
            self.log_dict({f"tracked_{key}": one for key, one in self.tracker.compute().items()})
            best = self.tracker.best_metric()
            self.log_dict({f"best_{key}": one for key, one in best.items() if one is not None})
        self.log_at_end("val")
        if "collects_predictions" in self.peculiar:
            self.log("val_collected", torch.cat(self.collected).to(self.net[0].bias.dtype).mean())
        if "collects_losses" in self.peculiar:
            self.log("val_collected_loss", torch.stack(self.collected).mean())

    def on_test_epoch_end(self) -> None:
        self.log_at_end("test")

    def configure_optimizers(self) -> Any:
        return configure(self, self.case.optimization.optimizer, self.case.optimization.scheduler)


TRAIN_OUTPUTS: dict[str, Callable[..., Any]] = {
    "tensor": lambda loss, logits, y, losses: loss,
    "dict": lambda loss, logits, y, losses: {"loss": loss},
    "extra": lambda loss, logits, y, losses: {"loss": loss, "mean": losses.mean(), "square": losses.square().mean()},
    "ints": lambda loss, logits, y, losses: {"loss": loss, "n": len(y), "correct": int((logits.argmax(1) == y).sum())},
    "logits": lambda loss, logits, y, losses: {"loss": loss, "logits": logits.detach()},
    "texts": lambda loss, logits, y, losses: {"loss": loss, "note": "a", "none": None, "flag": True},
    "lists": lambda loss, logits, y, losses: {"loss": loss, "per_sample": losses.tolist(), "targets": list(y)},
    "weight": lambda loss, logits, y, losses: {"loss": loss, "loss_weight": (1.0 + y).sum()},
    "weight_int": lambda loss, logits, y, losses: {"loss": loss, "loss_weight": int((1 + y).sum())},
    "weight_float": lambda loss, logits, y, losses: {"loss": loss, "loss_weight": float((1 + y).sum())},
    "sum": lambda loss, logits, y, losses: loss,
}
EVAL_OUTPUTS: dict[str, Callable[..., Any]] = {
    "none": lambda logits, y, losses: None,
    "mean": lambda logits, y, losses: losses.mean(),
    "losses": lambda logits, y, losses: losses,
    "dict": lambda logits, y, losses: {"logits": logits, "y": y, "loss": losses.mean()},
    "ints": lambda logits, y, losses: {"n": len(y), "correct": int((logits.argmax(1) == y).sum())},
    "list": lambda logits, y, losses: list(logits),
    "list_of_rows": lambda logits, y, losses: [row[: 1 + int(c) % 2] for row, c in zip(logits, y, strict=True)],
    "python_list": lambda logits, y, losses: losses.tolist(),
    "strings": lambda logits, y, losses: {"names": [str(int(one)) for one in y], "kind": "abc"},
    "sum": lambda logits, y, losses: {"total": losses.sum()},
    "confusion": lambda logits, y, losses: torch.nn.functional.one_hot(y, 3).sum(0),
    "gram": lambda logits, y, losses: logits.T @ logits,
    "empty": lambda logits, y, losses: {},
}
PREDICTIONS: dict[str, Callable[..., Any]] = {
    "tensor": lambda logits, classes: logits,
    "tuple": lambda logits, classes: (logits, classes),
    "dict": lambda logits, classes: {"logits": logits, "classes": classes},
    "list": lambda logits, classes: list(logits),
    "tuple_of_rows": lambda logits, classes: tuple(logits),
    "pair": lambda logits, classes: [logits, logits * 2],
    "strings": lambda logits, classes: [f"class {int(one)}" for one in classes],
    "python_list": lambda logits, classes: classes.tolist(),
    "numpy": lambda logits, classes: logits.cpu().numpy(),
    "none": lambda logits, classes: None,
    "mean": lambda logits, classes: logits.mean(),
    "mean_vector": lambda logits, classes: logits.mean(0),
    "ragged": lambda logits, classes: [row[: 1 + int(c)] for row, c in zip(logits, classes, strict=True)],
    "dicts": lambda logits, classes: [{"row": row, "class": int(c)} for row, c in zip(logits, classes, strict=True)],
    "nested": lambda logits, classes: {"a": [logits, {"b": classes}], "n": len(logits)},
    "bool": lambda logits, classes: bool((classes == 0).any()),
    "constant": lambda logits, classes: (torch.tensor([0.1, 0.2, 0.7]), logits),
    "time_first": lambda logits, classes: logits.T.contiguous(),
}
LOGGED: dict[str, Callable[..., tuple[Any, str]]] = {
    "loss": lambda module, logits, y, losses: (losses.mean(), "mean"),
    "hits": lambda module, logits, y, losses: ((logits.argmax(1) == y).to(losses.dtype).mean(), "mean"),
    "sum": lambda module, logits, y, losses: (losses.sum(), "sum"),
    "n": lambda module, logits, y, losses: (float(len(y)), "sum"),
    "n_int": lambda module, logits, y, losses: (len(y), "sum"),
    "max": lambda module, logits, y, losses: (losses.max(), "max"),
    "min": lambda module, logits, y, losses: (losses.min(), "min"),
    "constant": lambda module, logits, y, losses: (3.0, "mean"),
    "int": lambda module, logits, y, losses: (3, "mean"),
    "epoch": lambda module, logits, y, losses: (float(module.current_epoch), "mean"),
    "vector": lambda module, logits, y, losses: (losses.mean().reshape(1), "mean"),
    "weight_norm": lambda module, logits, y, losses: (module.net[-1].weight.detach().norm(), "mean"),
}


def _halve_gradients(self: Subject) -> None:
    for p in self.parameters():
        if p.grad is not None:
            p.grad.data = p.grad.data / (1.0 + p.grad.data.norm())


def _step_of_optimizer(self: Subject, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (1 + self.trainer.global_step)
    optimizer.step(closure=closure)


OVERRIDES: dict[str, tuple[str, Callable[..., Any]]] = {
    "edits_gradients": ("on_after_backward", _halve_gradients),
    "own_clipping": (
        "configure_gradient_clipping",
        lambda self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None: self.clip_gradients(
            optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm"
        ),
    ),
    "own_optimizer_step": ("optimizer_step", _step_of_optimizer),
    "own_transfer": ("transfer_batch_to_device", lambda *args: pl.LightningModule.transfer_batch_to_device(*args)),
    "moves_batch": ("on_after_batch_transfer", lambda self, batch, dataloader_idx: batch),
    "no_batch_idx": ("training_step", lambda self, batch: Subject.training_step(self, batch, 0)),
    "custom_step": ("lr_scheduler_step", lambda self, scheduler, metric: scheduler.step()),
}


def make_subject(case: Case) -> Subject:
    """The module, with only those hooks overridden that the case asks for: the lean loop leaves out the others."""
    wanted = (*case.net.peculiar, case.optimization.scheduler)
    return type("Subject", (Subject,), dict(OVERRIDES[name] for name in wanted if name in OVERRIDES))(case)
