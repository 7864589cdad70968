"""What the fork servers of the tests import before they fork: libraries, and what `PRELOADED` names beside them."""

import gc
import importlib
import inspect
import multiprocessing
import os
import sys

gc.disable()  # while importing, which makes no garbage

import hydra.experimental.callback
import numpy
import rich.console
import rich.progress
import rich.table
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.launcher.api
import torch.utils.tensorboard
import torchmetrics

__all__ = ["MAIN_PROCESS", "PATH", "hydra", "numpy", "rich", "torch", "torchmetrics"]

PATH = [entry for entry in sys.path if entry and entry not in os.environ["PYTHONPATH"].split(os.pathsep)]
"""Where any Python program of this environment finds modules."""

MAIN_PROCESS = multiprocessing.current_process()
"""What `current_process` returns in a process that `multiprocessing` has not started."""

os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)[2]  # without this folder, as it was
for name in os.environ.pop("PRELOADED", "").split():
    importlib.import_module(name)
inspect.stack()  # torchrun's agent does so again and again; the first time it looks for the file of every module
gc.freeze()  # a collection writes to every object: each process would copy all memory that it shares with the server
gc.enable()
