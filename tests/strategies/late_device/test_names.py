"""A device type that no list of this project names works by the name that a package has registered with Lightning."""

import json
import warnings
from pathlib import Path

import late_device
import pytest
import torch
from late_device import needs_late_device

from evener.strategies.core.devices import ConfigError, resolve_devices, to_device
from evener.trainer import compose, train

pytestmark = needs_late_device


def _names() -> list[str]:
    with late_device.host_waits() as waits:
        to_device(torch.ones(2).pin_memory(), torch.device("late:1"))
    assert waits == []
    with pytest.raises(ConfigError, match=r"devices: late:7 does not exist; this machine has 4 of type late\."):
        resolve_devices(["late:7"])
    return [str(found) for found in (*resolve_devices("auto", "late"), *resolve_devices(["late:0", "late:1"]))]


def test_devices_are_found() -> None:
    # Failed before: `accelerator=late` and `devices=[late:0]` were unknown.
    assert late_device.run(_names) == ["late:0", "late:1", "late:2", "late:3", "late:0", "late:1"]


WAYS = [
    ["strategy=dp", "accelerator=auto"],
    # Failed before, as on a GPU: micro-batches of evaluation wait on the host, and are tensors of inference mode.
    ["strategy=model_parallel", "strategy.num_microbatches=2", "accelerator=late"],
]


def _commands(folder: Path) -> list[list[str]]:
    warnings.simplefilter("ignore")
    found = []
    for i, words in enumerate(WAYS):
        train(compose([*words, "experiment=digits", "devices=2", "trainer.max_epochs=1", f"run_dir={folder}/{i}"]))
        found.append(json.loads((folder / str(i) / "result.json").read_text())["devices"])
    return found


def test_the_command_trains_on_it(tmp_path: Path) -> None:
    for devices in late_device.run(_commands, tmp_path):
        assert devices[:2] == ["late:0", "late:1"]
