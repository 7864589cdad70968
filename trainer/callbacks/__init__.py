"""Provide callbacks for every run, and the measurements behind them.

Exports: the callbacks below; batch_layout, flops.
May import: nothing else in the trainer.
"""

from .curves import Curves
from .device_monitor import DeviceMonitor
from .epoch_lines import EpochLines, LogEveryEpoch
from .gradient_norm import GradientNorm
from .histograms import Histograms
from .learning_rate import LearningRate
from .lr_finder import LearningRateFinder
from .module_summary import ModuleSummary
from .nonfinite import DetectNonFinite
from .run_summary import RunSummary
from .slow_rank import SlowRank
from .start_up import StartUp
from .utilization import Utilization

__all__ = [
    "Curves",
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
