"""The trainer and the command."""

from .app import compose, train
from .command import main
from .result import Result
from .trainer import Trainer

__all__ = ["Result", "Trainer", "compose", "main", "train"]
