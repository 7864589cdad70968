"""Provide callbacks for every run, and the measurements behind them.

Exports: the callbacks below; start_up, step_times.
May import: nothing else in the trainer.
"""

from pytorch_lightning.callbacks import LearningRateMonitor

from .gradients import DetectNonFinite, GradientNorm, Histograms
from .lr_finder import LearningRateFinder
from .start_up import EpochLines, LogEveryEpoch, StartUp
from .step_times import DeviceMonitor, RunSummary, Utilization

LearningRate = LearningRateMonitor
"""The name of configurations of earlier versions."""

__all__ = [
    "DetectNonFinite", "DeviceMonitor", "EpochLines", "GradientNorm", "Histograms", "LearningRate",
    "LearningRateFinder", "LogEveryEpoch", "RunSummary", "StartUp", "Utilization",
]  # fmt: skip
