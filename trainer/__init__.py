"""Provide the Trainer and the command line."""

from ..strategies import ConfigError  # first: it makes both names of Lightning one package
from .cli.main import main
from .cli.train import compose, train
from .job.result import Result
from .trainer import Trainer

__all__ = ["ConfigError", "Result", "Trainer", "compose", "main", "train"]
