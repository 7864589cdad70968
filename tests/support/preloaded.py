"""What the fork server of the tests imports before it forks: the libraries of every rank."""

import gc

gc.disable()  # while importing, which makes no garbage

import multiprocessing
import os
import sys

import numpy
import pytest
import torchmetrics

import evener.strategies
import evener.trainer

__all__ = ["MAIN_PROCESS", "PATH", "evener", "numpy", "pytest", "torchmetrics"]

PATH = [entry for entry in sys.path if entry and entry not in os.environ["PYTHONPATH"].split(os.pathsep)]
"""Where any Python program of this environment finds modules."""

MAIN_PROCESS = multiprocessing.current_process()
"""What `current_process` returns in a process that `multiprocessing` has not started."""

os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)[2]  # without this folder, as it was
gc.freeze()  # a collection writes to every object: each rank would copy all memory that it shares with the server
gc.enable()
