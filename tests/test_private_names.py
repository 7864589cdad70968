"""The private names of torch, Lightning and torchmetrics that we rely on exist, and do what they did.

A name that is imported, called or overridden fails by itself where a library has renamed it (overrides by the type
checker, since they are marked `@override`). One that is set, or asked for with a default, would fail in silence.
"""

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultMetric
from pytorch_lightning.utilities.combined_loader import _MaxSizeCycle, _Sequential
from pytorch_lightning.utilities.enums import GradClipAlgorithmType
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter
from torchmetrics.wrappers import Running
from typing_extensions import override

ROOT = Path(__file__).parents[1]
LIBRARIES = (
    "torch",
    "pytorch_lightning",
    "lightning_fabric",
    "torchmetrics",
    "multiprocessing",
    "collections",
    "typing",
)


def _defined(tree: ast.Module) -> Iterator[str]:
    """The names that this project's own classes define or set on themselves."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _is_own(owner: ast.expr) -> bool:
    return ast.unparse(owner) in ("self", "cls", "super()")


def _silent(tree: ast.Module) -> Iterator[str]:
    """Names that are set on others' objects, or asked for with a default."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not _is_own(node.value):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            yield ast.unparse(node.args[1]).strip("'")


def test_private_names_that_are_set_or_asked_for_exist() -> None:
    paths = [*(ROOT / "trainer").rglob("*.py"), *(ROOT / "strategies").rglob("*.py")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    own = {name for tree in trees for name in _defined(tree)}
    names = {name for tree in trees for name in _silent(tree) if re.fullmatch(r"_[a-z]\w*[a-z]", name)} - own
    files = {getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())
             if name.partition(".")[0] in LIBRARIES}  # fmt: skip
    words = {
        word
        for file in files
        if file.endswith(".py") and Path(file).is_file()
        for word in re.findall(r"\w+", Path(file).read_text("utf-8"))
    }
    missing = names - words
    assert not missing, " ".join(sorted(missing))


def test_steps_of_lightnings_training_loop_are_the_known_ones() -> None:
    """`LeanTrainingEpochLoop` does again what these two methods do: a new step in them must be looked at."""
    from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop as Loop

    advance = inspect.getsource(Loop.advance)
    calls = (
        "_broadcast_sigterm_tensor", "convert_input", "_on_before_batch_transfer", "batch_to_device", "increment_ready",
        "on_batch_start", "on_train_batch_start", "increment_started", "automatic_optimization.run",
        "increment_processed", "update_lr_schedulers", "StopIteration", "on_train_batch_end", "on_batch_end",
        "increment_completed", "update_train_step_metrics",
    )  # fmt: skip
    for call in calls:
        assert call in advance
    assert advance.count("call._call_") == 6
    end = inspect.getsource(Loop.on_advance_end)
    for call in (
        "_should_check_val_fx",
        "update_lr_schedulers",
        "_batches_that_stepped",
        "_save_loggers_on_train_batch",
    ):
        assert call in end


class Watch(pl.Callback):
    """Reads the private names of a trainer at work."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        epoch, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
        combined = trainer.fit_loop._combined_loader
        assert trainer.fit_loop.epoch_loop._batches_that_stepped == batch_idx
        assert trainer._active_loop is trainer.fit_loop
        assert connector._first_loop_iter is (batch_idx == 0)
        assert connector._current_fx == "training_step"
        assert epoch._skip_next_val is False
        assert epoch._should_accumulate() is False
        assert epoch.automatic_optimization._skip_backward is False
        assert combined._mode == "max_size_cycle"
        assert trainer.fit_loop._data_fetcher.combined_loader is combined
        batches = combined._iterator
        assert isinstance(batches, _MaxSizeCycle)
        assert combined._spec.num_nodes == 1
        assert batches._idx == batch_idx + 1
        assert batches._consumed == [False]
        logged = epoch._results["training_step.loss"]
        assert isinstance(logged, _ResultMetric)
        assert epoch._results._forked_name(logged, True) == ("loss", "loss_step")
        assert logged._update_count == batch_idx + 1
        assert logged._forward_cache == 0
        [optimizer] = trainer.strategy._lightning_optimizers
        assert optimizer._optimizer is trainer.optimizers[0]
        assert trainer._signal_connector.received_sigterm is False
        assert trainer.strategy._model is pl_module
        self.seen.append("train")

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        loop = trainer._evaluation_loop
        assert loop is trainer.fit_loop.epoch_loop.val_loop
        assert isinstance(loop._combined_loader._iterator, _Sequential)
        self.seen.append(sum(loop._seen_batches_per_dataloader.values()))


QUIET: dict[str, Any] = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    "accelerator": "cpu",
}  # fmt: skip


class Zero(pl.LightningModule):
    """Its loss is zero times a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    @override
    def training_step(self, batch: Tensor) -> Tensor:
        loss = (self.weight * batch).sum() * 0
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    @override
    def validation_step(self, batch: Tensor) -> None:
        pass

    @override
    def predict_step(self, batch: Tensor) -> Tensor:
        return batch + 1

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore")
def test_names_of_lightning_do_what_they_are_read_for() -> None:
    loader, watch = DataLoader(torch.zeros(6, 1), batch_size=2), Watch()
    trainer = pl.Trainer(max_epochs=1, callbacks=[watch], num_sanity_val_steps=0, **QUIET)
    trainer.fit(Zero(), loader, loader)
    assert [seen for seen in watch.seen if seen == "train"] == ["train"] * 3
    assert [seen for seen in watch.seen if seen != "train"] == [0, 1, 2]
    assert trainer._logger_connector._callback_metrics["loss_epoch"] == 0
    assert trainer._val_check_time_interval is None
    assert trainer.lightning_module._compiler_ctx is None
    assert trainer.lightning_module._fabric is None
    assert trainer.strategy._checkpoint_io is not None or trainer.strategy.checkpoint_io is not None
    trainer.predict(trainer.lightning_module, loader)
    assert len(trainer.predict_loop._predictions[0]) == 3
    every = ModelCheckpoint(every_n_train_steps=7)
    assert (every._every_n_train_steps, every._every_n_epochs) == (7, 0)
    assert ModelCheckpoint(train_time_interval=timedelta(1))._train_time_interval == timedelta(1)
    assert DDPStrategy(static_graph=True)._ddp_kwargs == {"static_graph": True}
    clipped = torch.ones(2, requires_grad=True)
    clipped.grad = torch.ones(2)
    Precision().clip_gradients(torch.optim.SGD([clipped], 0.1), 0.5, GradClipAlgorithmType.VALUE)
    assert clipped.grad.tolist() == [0.5, 0.5]


def test_names_of_torchmetrics_do_what_they_are_read_for() -> None:
    metric = torchmetrics.CatMetric()
    assert metric._defaults == {"value": []}
    assert metric._reductions["value"]([torch.ones(1), torch.ones(1)]).tolist() == [1, 1]
    assert (metric._update_count, metric._computed) == (0, None)
    assert metric(2.0) == metric._forward_cache == 2
    metric.update(3.0)
    assert metric._update_count == 2
    assert metric.compute() is metric._computed
    metric._computed = None
    assert metric.compute().tolist() == [2, 3]
    other = torchmetrics.CatMetric()
    other.update(1.0)
    metric._reduce_states(dict(other.metric_state))
    metric._computed = None
    assert sorted(metric.compute().tolist()) == [1, 2, 3]
    assert callable(metric._sync_dist)
    window = Running(torchmetrics.SumMetric(), window=2)
    for value in range(3):
        window.update(value)
    assert window._num_vals_seen == 3
    pair = torchmetrics.MetricCollection({"a": torchmetrics.SumMetric(), "b": torchmetrics.SumMetric()})
    assert pair._groups_checked is False
    pair.update(1.0)
    assert pair._groups == {0: ["a", "b"]}
    assert pair._groups_checked is True
    assert list(pair._to_renamed_dict()) == ["a", "b"]
    assert isinstance(pair._state_is_copy, bool)


@pytest.mark.filterwarnings("ignore")
def test_names_of_torch_do_what_they_are_read_for(tmp_path: Path) -> None:
    parameter, called = nn.Parameter(torch.ones(1)), []
    parameter.register_hook(called.append)
    kept = parameter._backward_hooks
    parameter._backward_hooks = None
    parameter.sum().backward()
    assert called == []
    parameter._backward_hooks = kept
    parameter.sum().backward()
    assert len(called) == 1
    sums = [torch.ones(2)]
    torch._foreach_add_(sums, [torch.ones(2)])
    torch._foreach_div_(sums, 4.0)
    assert sums[0].tolist() == [0.5, 0.5]
    torch._foreach_copy_(sums, [torch.zeros(2)])
    assert sums[0].tolist() == [0, 0]
    view, storage = sums[0][1:], sums[0].untyped_storage()
    assert view.untyped_storage()._cdata == storage._cdata != torch.ones(1).untyped_storage()._cdata
    alone = torch._C._storage_Use_Count(storage._cdata)
    array = sums[0].detach()
    assert torch._C._storage_Use_Count(storage._cdata) == alone + 1
    del array, view
    assert [norm.item() for norm in torch._foreach_norm([torch.full((4,), 2.0)], 2)] == [4.0]
    assert not torch._C._dispatch_tls_is_dispatch_key_excluded("Python")
    assert torch.ops.aten.add_.Tensor._schema.is_mutable
    assert not torch.ops.aten.add.Tensor._schema.is_mutable
    assert torch.ops.aten.matmul.default.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    assert not torch.ops.aten.mm.default.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    node = nn.functional.mse_loss(parameter, torch.zeros(1)).grad_fn
    assert node._sequence_nr() == torch._C._autograd._get_sequence_nr() - 1
    in_transform = list[bool]()
    seen = torch._C._are_functorch_transforms_active
    torch.func.vmap(lambda row: (in_transform.append(seen()), row)[1])(torch.ones(1))
    assert (in_transform, torch._C._are_functorch_transforms_active()) == ([True], False)
    with torch.nn.utils.parametrize.cached():
        assert torch.nn.utils.parametrize._cache_enabled
    assert not torch.nn.utils.parametrize._cache_enabled

    layer = nn.Linear(1, 1)
    hook = layer.register_forward_pre_hook(lambda module, args: None)
    assert list(layer._forward_pre_hooks) == [hook.id]
    layer.register_buffer("kept", torch.zeros(1))
    layer.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert layer._non_persistent_buffers_set == {"scratch"}
    layer._apply(torch.Tensor.double)
    assert layer.weight.dtype == torch.float64
    replica = layer._replicate_for_data_parallel()
    assert replica is not layer
    assert isinstance(replica, nn.Linear)
    assert layer._compiled_call_impl is None
    layer.compile()
    assert layer._compiled_call_impl is not None
    assert torch.compile(layer)._orig_mod is layer
    assert torch._dynamo.config.recompile_limit > 0
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    rules.get_torch_obj_rule_map()
    rules.clear_lru_cache()
    assert rules.get_torch_obj_rule_map.cache_info().currsize == 0
    assert isinstance(nn.BatchNorm1d(1), _BatchNorm)
    assert isinstance(nn.Dropout(), _DropoutNd)
    with SummaryWriter(str(tmp_path)) as writer:
        assert writer._get_file_writer().get_logdir() == str(tmp_path)


def test_torch_numbers_the_groups_of_a_process_where_survivors_reset_it() -> None:
    assert distributed_c10d._world.group_count == 0
    assert inspect.getsource(distributed_c10d.destroy_process_group).count("_world.group_count = 0") == 1
