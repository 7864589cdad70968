"""The private names of torch, Lightning and torchmetrics that we rely on: they exist, and do what they did.

Append a line with the name that you use: the dotted path of a module, then the attribute in it.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import pytorch_lightning.loggers as pl_loggers
import torch
import torchmetrics
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.utilities.enums import GradClipAlgorithmType
from torch import Tensor, nn
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessContext
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter
from torchmetrics.wrappers import Running
from typing_extensions import override

from evener.strategies.core.private import of_lightning, of_metrics, of_torch, put

ROOT = Path(__file__).parents[1]

NAMES = """
pytorch_lightning.core.optimizer LightningOptimizer.step
pytorch_lightning.core.module LightningModule._on_before_batch_transfer
pytorch_lightning.core.module LightningModule._apply_batch_transfer_handler
pytorch_lightning.core.module LightningModule._call_batch_hook
pytorch_lightning.loops.evaluation_loop _EvaluationLoop._evaluation_step
pytorch_lightning.loops.evaluation_loop _EvaluationLoop.reset
pytorch_lightning.loops.evaluation_loop _EvaluationLoop.teardown
pytorch_lightning.loops.fetchers _DataFetcher.combined_loader
pytorch_lightning.loops.fetchers _DataLoaderIterDataFetcher
pytorch_lightning.loops.fetchers _PrefetchDataFetcher
pytorch_lightning.loops.fetchers _profile_nothing
pytorch_lightning.loops.optimization.automatic Closure.consume_result
pytorch_lightning.loops.optimization.automatic ClosureResult.from_training_step_output
pytorch_lightning.loops.optimization.automatic _AutomaticOptimization._make_backward_fn
pytorch_lightning.loops.optimization.automatic _AutomaticOptimization._training_step
pytorch_lightning.loops.optimization.automatic _AutomaticOptimization.run
pytorch_lightning.loops.prediction_loop _PredictionLoop._predict_step
pytorch_lightning.loops.prediction_loop _PredictionLoop._store_data_for_prediction_writer
pytorch_lightning.loops.training_epoch_loop _TrainingEpochLoop._broadcast_sigterm_tensor
pytorch_lightning.loops.training_epoch_loop _TrainingEpochLoop._build_kwargs
pytorch_lightning.loops.training_epoch_loop _TrainingEpochLoop._is_training_done
pytorch_lightning.loops.training_epoch_loop _TrainingEpochLoop._num_ready_batches_reached
pytorch_lightning.loops.training_epoch_loop _TrainingEpochLoop._should_accumulate
pytorch_lightning.loops.training_epoch_loop _TrainingEpochLoop._should_check_val_fx
pytorch_lightning.loops.training_epoch_loop _TrainingEpochLoop.advance
pytorch_lightning.loops.training_epoch_loop _TrainingEpochLoop.done
pytorch_lightning.loops.training_epoch_loop _TrainingEpochLoop.on_advance_end
pytorch_lightning.loops.training_epoch_loop _TrainingEpochLoop.on_run_start
pytorch_lightning.loops.training_epoch_loop _TrainingEpochLoop.update_lr_schedulers
lightning_fabric.utilities.imports _IS_INTERACTIVE
pytorch_lightning.loops.fit_loop _FitLoop.on_advance_end
pytorch_lightning.overrides.distributed _IndexBatchSamplerWrapper
pytorch_lightning.overrides.distributed prepare_for_backward
pytorch_lightning.plugins.precision Precision._after_closure
pytorch_lightning.plugins.precision Precision._clip_gradients
pytorch_lightning.plugins.precision Precision._wrap_closure
pytorch_lightning.strategies.launchers _MultiProcessingLauncher
pytorch_lightning.strategies.launchers _MultiProcessingLauncher.launch
pytorch_lightning.loops.fit_loop _FitLoop._can_stop_early
pytorch_lightning.trainer.call _call_teardown_hook
pytorch_lightning.trainer.call _interrupt
pytorch_lightning.trainer.trainer Trainer._teardown
pytorch_lightning.tuner.lr_finder _LRCallback.on_train_batch_end
pytorch_lightning.utilities.exceptions _TunerExitException
pytorch_lightning.trainer.call log
pytorch_lightning.trainer.connectors.checkpoint_connector _CheckpointConnector.dump_checkpoint
pytorch_lightning.trainer.connectors.checkpoint_connector _CheckpointConnector.resume_start
pytorch_lightning.trainer.connectors.logger_connector _LoggerConnector.epoch_end_reached
pytorch_lightning.trainer.connectors.logger_connector _LoggerConnector.log_metrics
pytorch_lightning.trainer.connectors.logger_connector _LoggerConnector.on_epoch_end
pytorch_lightning.trainer.connectors.logger_connector _LoggerConnector.update_eval_epoch_metrics
pytorch_lightning.trainer.connectors.logger_connector _LoggerConnector.update_train_epoch_metrics
pytorch_lightning.trainer.connectors.signal_connector _SignalConnector._sigterm_notifier_fn
pytorch_lightning.trainer.connectors.logger_connector.result _Metadata
pytorch_lightning.trainer.connectors.logger_connector.result _Sync
pytorch_lightning.trainer.connectors.logger_connector _LoggerConnector.on_batch_end
pytorch_lightning.trainer.connectors.logger_connector _LoggerConnector.on_batch_start
pytorch_lightning.trainer.connectors.logger_connector _LoggerConnector.reset_results
pytorch_lightning.trainer.connectors.logger_connector _LoggerConnector.update_eval_step_metrics
pytorch_lightning.trainer.connectors.logger_connector.result _ResultCollection.log
pytorch_lightning.trainer.connectors.logger_connector.result _ResultCollection.metrics
pytorch_lightning.trainer.connectors.logger_connector.result _ResultCollection.reset
pytorch_lightning.trainer.connectors.logger_connector.result _ResultMetric.update
pytorch_lightning.trainer.trainer Trainer._active_loop
torch._subclasses.fake_tensor DataDependentOutputException
torch._subclasses.fake_tensor DynamicOutputShapeException
torch._subclasses.fake_tensor FakeTensorMode.from_tensor
torch._subclasses.fake_tensor UnsupportedOperatorException
torch.nn.modules.dropout _DropoutNd
pytorch_lightning.utilities.data _extract_batch_size
pytorch_lightning.trainer.connectors.logger_connector.result _ResultCollection._extract_batch_size
torch.nn.parallel DistributedDataParallel._get_ddp_logging_data
torch.utils._python_dispatch TorchDispatchMode
torch.nn.parallel DistributedDataParallel._inside_ddp_forward
torch.nn.parallel DistributedDataParallel._post_forward
torch.nn.parallel DistributedDataParallel._pre_forward
torch.nn.parallel DistributedDataParallel._root_copy_hook
torch.nn.parallel DistributedDataParallel._sync_buffers
torch.nn.parallel DistributedDataParallel.will_sync_module_buffers
torch.nn.parallel DistributedDataParallel._set_ddp_runtime_logging_sample_rate
pytorch_lightning.trainer.trainer Trainer._results
pytorch_lightning.trainer.trainer Trainer._run
pytorch_lightning.trainer.trainer Trainer._run_stage
pytorch_lightning.trainer.trainer Trainer.received_sigterm
pytorch_lightning.utilities.combined_loader _MaxSizeCycle
pytorch_lightning.utilities.data extract_batch_size
pytorch_lightning.utilities.signature_utils is_param_in_hook_signature
lightning_fabric.utilities.data _set_sampler_epoch
pytorch_lightning.callbacks.model_checkpoint ModelCheckpoint._format_checkpoint_name
pytorch_lightning.callbacks.model_checkpoint ModelCheckpoint._get_metric_interpolated_filepath_name
pytorch_lightning.callbacks.model_checkpoint ModelCheckpoint._monitor_candidates
pytorch_lightning.callbacks.model_checkpoint ModelCheckpoint._save_checkpoint
pytorch_lightning.callbacks.model_checkpoint ModelCheckpoint._save_last_checkpoint
pytorch_lightning.callbacks.model_checkpoint ModelCheckpoint._save_topk_checkpoint
pytorch_lightning.callbacks.model_checkpoint ModelCheckpoint._should_remove_checkpoint
pytorch_lightning.callbacks.model_checkpoint ModelCheckpoint._remove_checkpoint
pytorch_lightning.core.saving pl_load
pytorch_lightning.loops.fit_loop _FitLoop._load_combined_loader_states
pytorch_lightning.loops.fit_loop _FitLoop.load_state_dict
pytorch_lightning.loops.fit_loop _FitLoop.on_advance_end
pytorch_lightning.loops.fit_loop _FitLoop.on_load_checkpoint
pytorch_lightning.loops.fit_loop _FitLoop.on_run_end
pytorch_lightning.loops.fit_loop _FitLoop.on_run_start
pytorch_lightning.loops.fit_loop _FitLoop.on_save_checkpoint
pytorch_lightning.loops.training_epoch_loop _TrainingEpochLoop.reset
pytorch_lightning.trainer.connectors.logger_connector.result _Metadata
pytorch_lightning.trainer.connectors.logger_connector.result _ResultMetric
pytorch_lightning.trainer.connectors.logger_connector.result _Sync
pytorch_lightning.utilities.combined_loader CombinedLoader._state_dicts
pytorch_lightning.loops.evaluation_loop _EvaluationLoop._store_dataloader_outputs
torch.utils.data DataLoader._index_sampler
torch.utils.data DataLoader._get_iterator
torch.multiprocessing.spawn ProcessContext._join_procs_with_timeout
torch.utils.data._utils.worker ManagerWatchdog
torch.nn Module._replicate_for_data_parallel
torch.nn.modules.batchnorm _BatchNorm
torch.autograd _profiler_enabled
torch.autograd Variable._execution_engine.queue_callback
torch.autograd.graph _engine_run_backward
torch.optim.optimizer _global_optimizer_post_hooks
torch.optim.optimizer _global_optimizer_pre_hooks
torch.optim SGD.step.__wrapped__
pytorch_lightning.trainer.connectors.logger_connector.logger_connector _LoggerConnector.should_update_logs
torch.distributed.fsdp FSDPModule._get_fsdp_state
torch.distributed._composable.contract REGISTRY_KEY
torch.distributed._composable.contract STATE_KEY
torch.distributed.fsdp._fully_shard._fsdp_common TrainingState.IDLE
torch.distributed.fsdp._fully_shard._fsdp_param _get_orig_param_uid
torch.distributed.fsdp._fully_shard._fsdp_param_group FSDPParamGroup.post_backward
torch.distributed.fsdp._fully_shard._fsdp_state FSDPState._lazy_init
torch.distributed.fsdp._fully_shard._fsdp_state FSDPState._pre_forward
torch.distributed.fsdp._fully_shard._fsdp_state FSDPState._post_forward
torch.distributed.fsdp._fully_shard._fsdp_state FSDPState._pre_backward
torch.distributed.fsdp._fully_shard._fsdp_state FSDPState._root_post_backward_final_callback
torch.distributed.fsdp._fully_shard._fsdp_param FSDPParam.to_sharded
torch.distributed.fsdp._fully_shard._fsdp_param FSDPParam.to_unsharded
torch.distributed.fsdp._fully_shard._fsdp_param FSDPParam.reset_sharded_param
torch.distributed.tensor DTensor._local_tensor
torchmetrics Metric._reduce_states
torchmetrics Metric.merge_state
"""


@pytest.mark.parametrize("line", NAMES.strip().splitlines())
def test_name_exists(line: str) -> None:
    module, path = line.split()
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    assert found is not None


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        ("trainer", "_logger_connector _signal_connector _val_check_time_interval fit_loop validate_loop test_loop"),
        ("trainer.fit_loop", "_combined_loader _combined_loader_states_to_load _resuming_from_checkpoint"),
        ("trainer.fit_loop.epoch_loop", "batch_progress automatic_optimization manual_optimization val_loop _results"),
        ("trainer.fit_loop.epoch_loop", "_batches_that_stepped _skip_next_val _warning_cache _restarting"),
        (
            "trainer.fit_loop.epoch_loop.val_loop",
            "_has_run _seen_batches_per_dataloader _combined_loader _data_fetcher",
        ),
        ("trainer.fit_loop.epoch_loop.automatic_optimization", "optim_progress _skip_backward"),
        ("trainer.predict_loop", "_predictions _warning_cache _data_fetcher"),
        ("trainer._logger_connector", "_first_loop_iter _current_fx _callback_metrics _logged_metrics"),
        ("trainer._signal_connector", "received_sigterm"),
        ("trainer._checkpoint_connector", "_loaded_checkpoint"),
        ("trainer.strategy", "_checkpoint_io _lightning_optimizers lr_scheduler_configs"),
        ("module", "_current_fx_name _compiler_ctx _fabric _metric_attributes"),
    ],
)
def test_objects_keep_their_attributes(owner: str, names: str) -> None:
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
    first, *path = owner.split(".")
    found = {"trainer": trainer, "module": pl.LightningModule()}[first]
    for part in path:
        found = getattr(found, part)
    for name in names.split():
        assert hasattr(found, name), f"{owner}.{name}"


def test_metrics_keep_their_attributes() -> None:
    """What replicas/_metric_merge.py and _module_copy.py read of torchmetrics."""
    metric, collection = torchmetrics.SumMetric(), torchmetrics.MetricCollection([torchmetrics.SumMetric()])
    for name in ["_defaults", "_reductions", "_update_count", "_forward_cache", "_computed"]:
        assert hasattr(metric, name), name
    for name in ["_enable_compute_groups", "_groups_checked"]:
        assert hasattr(collection, name), name


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


# What the names in strategies/core/private do

PRIVATE = ROOT / "strategies" / "core" / "private"
ONE_PIECE_OF_TORCH = ("core/private/torch_loader.py", "sharding/_fsdp2.py", "loops/_torch_fast_path.py")
"""Files that do a piece of torch's own work again, and reach the names of that piece themselves."""
PYTHONS = {"_replace", "_fields", "_exit", "_popen", "_getframe", "_current_frames", "_shutdown", "_run_exitfuncs"} | {
    "_on_queue_feeder_error"
}
"""Names of Python's own library."""
OPTUNAS = {"_trial_id"}
"""Names of optuna, which one file uses."""
LIBRARIES = ("torch", "pytorch_lightning", "lightning_fabric", "torchmetrics")


def _product() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((*(ROOT / "trainer").rglob("*.py"), *(ROOT / "strategies").rglob("*.py"))):
        if path.parent != PRIVATE and not path.as_posix().endswith(ONE_PIECE_OF_TORCH):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def _known() -> set[str]:
    """The private names that the files of strategies/core/private reach."""
    nodes = [node for path in PRIVATE.glob("of_*.py") for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {name for text in strings for name in text.split(".") if re.fullmatch(r"_\w+", name)} | {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and node.attr.startswith("_")
    }


def _own(trees: Iterable[ast.Module]) -> set[str]:
    """The names that this project's classes and modules define."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def _is_own(owner: ast.expr) -> bool:
    return ast.unparse(owner) in ("self", "cls", "super()")


def test_private_names_of_libraries_are_reached_through_one_file_per_library() -> None:
    known, files = _known(), list(_product())
    own = _own(tree for _, tree in files) | PYTHONS | OPTUNAS
    strays: list[str] = []
    for path, tree in files:
        for node in ast.walk(tree):
            name = ""
            if isinstance(node, ast.Attribute) and not _is_own(node.value) and re.match(r"_[^_]", node.attr):
                name = node.attr if node.attr in known - PYTHONS or node.attr not in own else ""
            elif isinstance(node, ast.Constant) and node.value in known:
                name = str(node.value)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                name = next((name for name in names if name.startswith("_") and node.level == 0), "")
            if name:
                strays.append(f"{path}:{node.lineno} {name}")  # pyright: ignore[reportAttributeAccessIssue]
    assert strays == [], "reach these through strategies/core/private"


def test_what_is_set_by_put_is_there() -> None:
    """An attribute that a library has renamed would be set without any effect."""
    words = {keyword.arg for _, tree in _product() for node in ast.walk(tree) if isinstance(node, ast.Call)
             if ast.unparse(node.func) == "put" for keyword in node.keywords}  # fmt: skip
    owners = [pl.Trainer(**QUIET), torchmetrics.MetricCollection([torchmetrics.SumMetric()]), nn.Linear(1, 1).weight]
    owners += [Running(torchmetrics.SumMetric(), 2), pl_loggers.CSVLogger("unused"), nn.Module, DataLoader([1])]
    owners += [owners[0]._logger_connector, owners[0]._signal_connector, owners[0]._accelerator_connector]
    owners += [owners[0].fit_loop.epoch_loop.val_loop, owners[3].base_metric, ProcessContext]
    missing = {word for word in words if not any(hasattr(owner, f"_{word}") for owner in owners)}
    assert missing == set()


class Watch(pl.Callback):
    """Reads the private names of a trainer at work."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        epoch, connector = trainer.fit_loop.epoch_loop, of_lightning.logger_connector(trainer)
        combined = of_lightning.combined_loader(trainer.fit_loop)
        assert of_lightning.log_step(trainer) == batch_idx
        assert of_lightning.active_loop(trainer) is trainer.fit_loop
        assert of_lightning.first_loop_iter(connector) is (batch_idx == 0)
        assert connector._current_fx == "training_step"
        assert of_lightning.skip_next_val(epoch) is False
        assert of_lightning.should_accumulate(epoch)() is False
        assert of_lightning.skip_backward(epoch.automatic_optimization) is False
        assert of_lightning.mode(combined) == "max_size_cycle"
        assert of_lightning.data_fetcher(trainer.fit_loop).combined_loader is combined
        batches = of_lightning.iterator(combined)
        assert isinstance(batches, of_lightning.MaxSizeCycle)
        assert of_lightning.iterables(combined) is of_lightning.flattened(combined)[0]
        assert of_lightning.idx(batches) == batch_idx + 1
        assert of_lightning.consumed(batches) == [False]
        logged = of_lightning.results(epoch)["training_step.loss"]
        assert isinstance(logged, of_lightning.ResultMetric)
        assert of_lightning.forked_name(of_lightning.results(epoch))(logged, True) == ("loss", "loss_step")
        assert of_metrics.update_count(logged) == batch_idx + 1
        assert of_metrics.forward_cache(logged) == 0
        [optimizer] = of_lightning.lightning_optimizers(trainer.strategy)
        assert of_lightning.optimizer(optimizer) is trainer.optimizers[0]
        assert of_lightning.signal_connector(trainer).received_sigterm is False
        assert of_lightning.model(trainer.strategy) is pl_module
        self.seen.append("train")

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        loop = of_lightning.evaluation_loop(trainer)
        assert loop is trainer.fit_loop.epoch_loop.val_loop
        assert isinstance(of_lightning.iterator(of_lightning.combined_loader(loop)), of_lightning.Sequential)
        self.seen.append(sum(of_lightning.seen_batches_per_dataloader(loop).values()))


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
    assert of_lightning.callback_metrics(of_lightning.logger_connector(trainer))["loss_epoch"] == 0
    assert of_lightning.val_check_time_interval(trainer) is None
    assert of_lightning.compiler_ctx(trainer.lightning_module) is None
    assert of_lightning.fabric(trainer.lightning_module) is None
    assert of_lightning.checkpoint_io(trainer.strategy) is not None or trainer.strategy.checkpoint_io is not None
    trainer.predict(trainer.lightning_module, loader)
    assert len(of_lightning.predictions(trainer.predict_loop)[0]) == 3
    every = ModelCheckpoint(every_n_train_steps=7)
    assert (of_lightning.every_n_train_steps(every), of_lightning.every_n_epochs(every)) == (7, 0)
    assert of_lightning.train_time_interval(ModelCheckpoint(train_time_interval=timedelta(1))) == timedelta(1)
    assert of_lightning.ddp_kwargs(DDPStrategy(static_graph=True)) == {"static_graph": True}
    clipped = torch.ones(2, requires_grad=True)
    clipped.grad = torch.ones(2)
    Precision().clip_gradients(torch.optim.SGD([clipped], 0.1), 0.5, GradClipAlgorithmType.VALUE)
    assert clipped.grad.tolist() == [0.5, 0.5]


def test_names_of_torchmetrics_do_what_they_are_read_for() -> None:
    metric = torchmetrics.CatMetric()
    assert of_metrics.defaults(metric) == {"value": []}
    assert of_metrics.reductions(metric)["value"]([torch.ones(1), torch.ones(1)]).tolist() == [1, 1]
    assert (of_metrics.update_count(metric), of_metrics.computed(metric)) == (0, None)
    assert metric(2.0) == of_metrics.forward_cache(metric) == 2
    metric.update(3.0)
    assert of_metrics.update_count(metric) == 2
    assert metric.compute() is of_metrics.computed(metric)
    put(metric, computed=None)
    assert metric.compute().tolist() == [2, 3]
    other = torchmetrics.CatMetric()
    other.update(1.0)
    of_metrics.reduce_states(metric)(dict(other.metric_state))
    put(metric, computed=None)
    assert sorted(metric.compute().tolist()) == [1, 2, 3]
    assert callable(of_metrics.sync_dist(metric))
    window = Running(torchmetrics.SumMetric(), window=2)
    for value in range(3):
        window.update(value)
    assert of_metrics.num_vals_seen(window) == 3
    pair = torchmetrics.MetricCollection({"a": torchmetrics.SumMetric(), "b": torchmetrics.SumMetric()})
    assert of_metrics.groups_checked(pair) is False
    pair.update(1.0)
    assert of_metrics.groups(pair) == {0: ["a", "b"]}
    assert of_metrics.groups_checked(pair) is True
    assert list(of_metrics.to_renamed_dict(pair)()) == ["a", "b"]
    assert isinstance(of_metrics.state_is_copy(pair), bool)


@pytest.mark.filterwarnings("ignore")
def test_names_of_torch_do_what_they_are_read_for(tmp_path: Path) -> None:
    parameter, called = nn.Parameter(torch.ones(1)), []
    parameter.register_hook(called.append)
    kept = of_torch.backward_hooks(parameter)
    put(parameter, backward_hooks=None)
    parameter.sum().backward()
    assert called == []
    put(parameter, backward_hooks=kept)
    parameter.sum().backward()
    assert len(called) == 1
    sums = [torch.ones(2)]
    of_torch.foreach_add_(sums, [torch.ones(2)])
    of_torch.foreach_div_(sums, 4.0)
    assert sums[0].tolist() == [0.5, 0.5]
    of_torch.foreach_copy_(sums, [torch.zeros(2)])
    assert sums[0].tolist() == [0, 0]
    view, storage = sums[0][1:], sums[0].untyped_storage()
    assert (
        of_torch.cdata(view.untyped_storage())
        == of_torch.cdata(storage)
        != of_torch.cdata(torch.ones(1).untyped_storage())
    )
    alone = of_torch.storage_use_count(storage)
    array = sums[0].detach()
    assert of_torch.storage_use_count(storage) == alone + 1
    del array, view
    assert [norm.item() for norm in of_torch.foreach_norm([torch.full((4,), 2.0)], 2)] == [4.0]
    assert not of_torch.is_dispatch_key_excluded("Python")
    assert of_torch.schema(torch.ops.aten.add_.Tensor).is_mutable
    assert not of_torch.schema(torch.ops.aten.add.Tensor).is_mutable
    assert torch.ops.aten._local_scalar_dense is of_torch.local_scalar_dense
    in_transform = list[bool]()
    torch.func.vmap(lambda row: (in_transform.append(of_torch.transforms_active()), row)[1])(torch.ones(1))
    assert (in_transform, of_torch.transforms_active()) == ([True], False)
    with torch.nn.utils.parametrize.cached():
        assert of_torch.parametrizations_are_cached()
    assert not of_torch.parametrizations_are_cached()

    layer = nn.Linear(1, 1)
    hook = layer.register_forward_pre_hook(lambda module, args: None)
    assert list(of_torch.forward_pre_hooks(layer)) == [hook.id]
    layer.register_buffer("kept", torch.zeros(1))
    layer.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert of_torch.non_persistent_buffers(layer) == {"scratch"}
    of_torch.apply(layer)(torch.Tensor.double)
    assert layer.weight.dtype == torch.float64
    replica = of_torch.replicate_for_data_parallel(layer)()
    assert replica is not layer
    assert isinstance(replica, nn.Linear)
    assert of_torch.compiled_call_impl(layer) is None
    layer.compile()
    assert of_torch.compiled_call_impl(layer) is not None
    assert of_torch.orig_mod(torch.compile(layer)) is layer
    assert of_torch.dynamo_config().recompile_limit > 0
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    rules.get_torch_obj_rule_map()
    of_torch.clear_compile_rules()
    assert rules.get_torch_obj_rule_map.cache_info().currsize == 0
    assert isinstance(nn.BatchNorm1d(1), of_torch.BatchNorm)
    assert isinstance(nn.Dropout(), of_torch.DropoutNd)
    assert "c10d" in of_torch.registry(rendezvous_handler_registry)
    assert callable(of_torch.join_procs_with_timeout(ProcessContext))
    with SummaryWriter(str(tmp_path)) as writer:
        assert of_torch.get_file_writer(writer)().get_logdir() == str(tmp_path)


def test_every_name_of_the_private_files_is_tested_here_or_used() -> None:
    """A name that nobody uses any more is removed."""
    public = {
        target.id
        for path in PRIVATE.glob("of_*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.Assign)
        for target in ast.walk(node.targets[0])
        if isinstance(target, ast.Name)
    }
    used = {node.attr for _, tree in _product() for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {alias.name for _, tree in _product() for node in ast.walk(tree)
             if isinstance(node, ast.ImportFrom) for alias in node.names}  # fmt: skip
    assert public - used == set()


class _Called(torch.Tensor):
    """Counts the calls of functions with it."""

    num = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.num += 1
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("it has no elements to compute with")


def test_a_wrapper_has_a_layout_without_memory_and_calls_can_be_left_to_torch() -> None:
    made = of_torch.make_wrapper_subclass(torch.Tensor)(_Called, (3, 2), strides=(1, 3), dtype=torch.float64)
    with of_torch.DisableTorchFunctionSubclass():
        assert (tuple(made.shape), made.stride(), made.dtype) == ((3, 2), (1, 3), torch.float64)
    assert _Called.num == 0
    assert made.dim() == 2
    assert _Called.num > 0
    assert vars(DTensor)["__torch_function__"] is torch._C._disabled_torch_function_impl
