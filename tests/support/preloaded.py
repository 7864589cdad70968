"""What the fork server of the tests imports before it forks: the libraries of every rank, and those of commands."""

import gc
import inspect

gc.disable()  # while importing, which makes no garbage

import preloaded_libraries
import pytest

import evener.examples.digits
import evener.strategies
import evener.trainer
import evener.trainer.cli.main
import evener.trainer.cli.train
import evener.trainer.job.run
import evener.trainer.launch.launcher
import evener.trainer.trainer

__all__ = ["evener", "preloaded_libraries", "pytest"]

inspect.stack()  # torchrun's agent does so again and again; the first time it looks for the file of every module
gc.freeze()
gc.enable()
