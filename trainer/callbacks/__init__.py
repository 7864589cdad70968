"""Callbacks that every run may use."""

from .device_monitor import DeviceMonitor
from .learning_rate import LearningRate
from .log_interval import LogEveryEpoch
from .nonfinite import DetectNonFinite
from .run_summary import RunSummary

__all__ = ["DetectNonFinite", "DeviceMonitor", "LearningRate", "LogEveryEpoch", "RunSummary"]
