"""Every private name of Lightning that we rely on, so that an upgrade which moves one fails here and loudly.

Append a line with the name that you use: the dotted path of a module, then the attribute in it.
"""

import importlib
import inspect

import pytest
import pytorch_lightning as pl
import torchmetrics

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
pytorch_lightning.trainer.call _interrupt
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
torch.autograd.graph _engine_run_backward
torch.optim.optimizer _global_optimizer_post_hooks
torch.optim.optimizer _global_optimizer_pre_hooks
torch.optim SGD.step.__wrapped__
pytorch_lightning.trainer.connectors.logger_connector.logger_connector _LoggerConnector.should_update_logs
torch.distributed.fsdp FSDPModule._get_fsdp_state
torch.distributed.fsdp._fully_shard._fsdp_common TrainingState.IDLE
torch.distributed.fsdp._fully_shard._fsdp_param_group FSDPParamGroup.post_backward
torch.distributed.fsdp._fully_shard._fsdp_state FSDPState._lazy_init
torch.distributed.fsdp._fully_shard._fsdp_state FSDPState._pre_forward
torch.distributed.fsdp._fully_shard._fsdp_state FSDPState._post_forward
torch.distributed.fsdp._fully_shard._fsdp_state FSDPState._pre_backward
torch.distributed.fsdp._fully_shard._fsdp_state FSDPState._root_post_backward_final_callback
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
