"""What the fork server of the tests imports before it forks: the libraries of every rank."""

import gc

gc.disable()  # while importing, which makes no garbage

import os

import numpy
import pytest
import torchmetrics

import evener.strategies
import evener.trainer

__all__ = ["evener", "numpy", "pytest", "torchmetrics"]

os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)[2]  # without this folder, as it was
gc.freeze()  # a collection writes to every object: each rank would copy all memory that it shares with the server
gc.enable()
