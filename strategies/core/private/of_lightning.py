"""Private names of Lightning: of `pytorch_lightning` and of `lightning_fabric`."""

from operator import attrgetter
from typing import Any

from lightning_fabric.utilities import data as fabric_data
from lightning_fabric.utilities import distributed, imports, types
from pytorch_lightning.loops import evaluation_loop as evaluation
from pytorch_lightning.loops import fetchers, fit_loop, loop, prediction_loop, progress, training_epoch_loop
from pytorch_lightning.loops.optimization import automatic
from pytorch_lightning.overrides import distributed as overrides
from pytorch_lightning.strategies.launchers import launcher
from pytorch_lightning.trainer import call
from pytorch_lightning.trainer.connectors import checkpoint_connector
from pytorch_lightning.trainer.connectors import logger_connector as connectors
from pytorch_lightning.trainer.connectors.logger_connector import result
from pytorch_lightning.tuner import lr_finder
from pytorch_lightning.utilities import combined_loader as combined
from pytorch_lightning.utilities import data, exceptions

PATH = types._PATH
IS_INTERACTIVE: Any = imports._IS_INTERACTIVE
interrupt = call._interrupt
set_num_threads_if_needed = distributed._set_num_threads_if_needed
set_sampler_epoch = fabric_data._set_sampler_epoch
extract_batch_sizes = data._extract_batch_size
IndexBatchSamplerWrapper = overrides._IndexBatchSamplerWrapper
Launcher = launcher._Launcher
LRCallback = lr_finder._LRCallback
"""The only callback of a trainer that searches for a learning rate; it records the losses."""
TunerExit: type[Exception] = exceptions._TunerExitException
"""Raised by a tuner's callback once it has found what it searched for; the rest of the run is left out."""

# loops
AutomaticOptimization = automatic._AutomaticOptimization
BaseProgress = progress._BaseProgress
EvaluationLoop = evaluation._EvaluationLoop
FitLoop = fit_loop._FitLoop
Loop = loop._Loop
PredictionLoop = prediction_loop._PredictionLoop
TrainingEpochLoop = training_epoch_loop._TrainingEpochLoop
can_stop_early = attrgetter("_can_stop_early")
log_step = attrgetter("fit_loop.epoch_loop._batches_that_stepped")
"""Of a trainer: the step number under which values are logged."""
predictions = attrgetter("_predictions")
results = attrgetter("_results")
seen_batches_per_dataloader = attrgetter("_seen_batches_per_dataloader")
should_accumulate = attrgetter("_should_accumulate")
skip_backward = attrgetter("_skip_backward")
skip_next_val = attrgetter("_skip_next_val")
store_data_for_prediction_writer = attrgetter("_store_data_for_prediction_writer")
warning_cache = attrgetter("_warning_cache")

# fetchers and combined loaders
DataFetcher = fetchers._DataFetcher
DataLoaderIterDataFetcher = fetchers._DataLoaderIterDataFetcher
PrefetchDataFetcher = fetchers._PrefetchDataFetcher
MaxSizeCycle = combined._MaxSizeCycle
Sequential = combined._Sequential
batch_sampler = attrgetter("_batch_sampler")
COMBINED_LOADER, ITERATOR = "_combined_loader", "_iterator"
combined_loader = attrgetter(COMBINED_LOADER)
consumed = attrgetter("_consumed")
data_fetcher = attrgetter("_data_fetcher")
data_source = attrgetter("_data_source")
flattened = attrgetter("_flattened")
idx = attrgetter("_idx")
iterables = attrgetter("_iterables")
iterator = attrgetter(ITERATOR)
mode = attrgetter("_mode")
state_dicts = attrgetter("_state_dicts")


def fetch_unprofiled(fetcher: Any) -> None:
    """Have a fetcher record nothing for the profiler."""
    fetcher._start_profiler = fetcher._stop_profiler = fetchers._profile_nothing


def teardown(trainer: Any) -> None:
    """End a trainer's run, as its entry points do after `TunerExit`."""
    call._call_teardown_hook(trainer)
    trainer._teardown()


def count_batch(batches: Any) -> None:
    """Have the iterator of a combined loader count a batch that was read past it."""
    batches._idx += 1


# the trainer, its connectors, and what was logged
CheckpointConnector = checkpoint_connector._CheckpointConnector
LoggerConnector = connectors._LoggerConnector
Metadata = result._Metadata
ResultCollection = result._ResultCollection
ResultMetric = result._ResultMetric
Sync = result._Sync
COLLECTED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
accelerator_connector = attrgetter("_accelerator_connector")
active_loop = attrgetter("_active_loop")
callback_metrics = attrgetter("_callback_metrics")
callbacks = attrgetter("callbacks")  # a list that Lightning does not declare
connector = attrgetter("_checkpoint_connector")
evaluation_loop = attrgetter("_evaluation_loop")
first_loop_iter = attrgetter("_first_loop_iter")
get_loops_state_dict = attrgetter("_get_loops_state_dict")
forked_name = attrgetter("_forked_name")
init_strategy, lazy_init_strategy = attrgetter("_init_strategy"), attrgetter("_lazy_init_strategy")
logger_connector = attrgetter("_logger_connector")
signal_connector = attrgetter("_signal_connector")
sigterm_notifier_fn = attrgetter("_sigterm_notifier_fn")
val_check_time_interval = attrgetter("_val_check_time_interval")

# strategies, precision, optimizers, modules, callbacks, loggers
CLIP_GRADIENTS, CLOSURES = "_clip_gradients", ("_wrap_closure", "_after_closure")
MODEL_AVERAGER = "_model_averager"
TRANSFERS = ("_on_before_batch_transfer", "_apply_batch_transfer_handler", "_call_batch_hook")
apply_batch_transfer_handler = attrgetter("_apply_batch_transfer_handler")
checkpoint_io = attrgetter("_checkpoint_io")
clip_gradients = attrgetter(CLIP_GRADIENTS)
compiler_ctx = attrgetter("_compiler_ctx")
ddp_kwargs = attrgetter("_ddp_kwargs")
every_n_epochs = attrgetter("_every_n_epochs")
every_n_train_steps = attrgetter("_every_n_train_steps")
EXPERIMENT = "_experiment"
experiment = attrgetter(EXPERIMENT)
fabric = attrgetter("_fabric")
lightning_module = attrgetter("_lightning_module")
lightning_optimizers = attrgetter("_lightning_optimizers")
model = attrgetter("_model")
on_before_batch_transfer = attrgetter("_on_before_batch_transfer")
optimizer = attrgetter("_optimizer")
duration = attrgetter("_duration")
train_time_interval = attrgetter("_train_time_interval")
