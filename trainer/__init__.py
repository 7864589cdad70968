"""The trainer and the command."""

from .trainer import Trainer

__all__ = ["Trainer"]
