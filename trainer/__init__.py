"""Provide the Trainer and the command line."""

from .cli.main import main
from .cli.train import compose, train
from .job.result import Result
from .trainer import Trainer

__all__ = ["Result", "Trainer", "compose", "main", "train"]
