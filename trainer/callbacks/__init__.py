"""Provide callbacks for every run, and the measurements behind them.

Exports: the callbacks below; batch_layout, flops, step_times.
May import: nothing else in the trainer.
"""

from pytorch_lightning.callbacks import LearningRateMonitor

from .curves import Curves
from .device_monitor import DeviceMonitor
from .epoch_lines import EpochLines, LogEveryEpoch
from .gradient_norm import GradientNorm
from .histograms import Histograms
from .lr_finder import LearningRateFinder
from .nonfinite import DetectNonFinite
from .run_summary import RunSummary
from .slow_rank import SlowRank
from .start_up import ModuleSummary, StartUp
from .utilization import Utilization

LearningRate = LearningRateMonitor
"""The name of configurations of earlier versions."""

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
