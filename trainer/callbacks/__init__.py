"""Callbacks that every run may use."""

from .device_monitor import DeviceMonitor
from .learning_rate import LearningRate
from .run_summary import RunSummary

__all__ = ["DeviceMonitor", "LearningRate", "RunSummary"]
