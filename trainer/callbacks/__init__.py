"""Provide callbacks for every run, and the measurements behind them.

Exports: the callbacks below; batch_layout, flops, peak_memory, step_times,
    unequal_devices.
May import: nothing else in the trainer.
"""

from .device_monitor import DeviceMonitor
from .epoch_lines import EpochLines
from .gradient_norm import GradientNorm
from .histograms import Histograms
from .learning_rate import LearningRate
from .log_interval import LogEveryEpoch
from .lr_finder import LearningRateFinder
from .module_summary import ModuleSummary
from .nonfinite import DetectNonFinite
from .run_summary import RunSummary
from .slow_rank import SlowRank
from .start_up import StartUp
from .utilization import Utilization

__all__ = [
    "DetectNonFinite",
    "DeviceMonitor",
    "EpochLines",
    "GradientNorm",
    "Histograms",
    "LearningRate",
    "LearningRateFinder",
    "LogEveryEpoch",
    "ModuleSummary",
    "RunSummary",
    "SlowRank",
    "StartUp",
    "Utilization",
]
