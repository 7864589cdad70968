"""A device type that no list of this project names works by the name that a package has registered with Lightning."""

import json
import warnings
from pathlib import Path

import late_device
import pytest
import torch
from late_device import needs_late_device

from evener.strategies.core.device_names import ConfigError, accelerator_type, resolve_devices
from evener.strategies.core.devices import device_name, memory_bytes, peak_memory_bytes, to_device

pytestmark = needs_late_device


def _names() -> list[object]:
    devices = ["late:0", "late:1"]
    late_device.set_limit(2**30)
    torch.empty(1024, device="late:1")
    device = torch.device("late:1")
    with late_device.host_waits() as waits:
        to_device(torch.ones(2).pin_memory(), device)
    return [
        accelerator_type("late"), accelerator_type("auto"), accelerator_type("gpu"), accelerator_type("cpu"),
        [str(found) for found in resolve_devices("auto", "late")] == ["late:0", "late:1", "late:2", "late:3"],
        [str(found) for found in resolve_devices(devices)] == devices,
        device_name(device), memory_bytes(device), peak_memory_bytes(device), waits,
    ]  # fmt: skip


def test_devices_are_found_and_described() -> None:
    # Failed before: `accelerator=late` and `devices=[late:0]` were unknown, and peaks and sizes were CUDA's alone.
    assert late_device.run(_names) == [
        "late", "late", "late", "cpu", True, True, "late:1", 2.0**30, 4096, []
    ]  # fmt: skip


def _missing() -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_devices(["late:7"])
    return str(caught.value)


def test_a_device_that_does_not_exist_is_refused() -> None:
    assert late_device.run(_missing) == "devices: late:7 does not exist; this machine has 4 of type late."


def _command(folder: str, *words: str) -> dict[str, object]:
    warnings.simplefilter("ignore")
    from evener.trainer import compose, train

    train(compose([*words, "experiment=digits", "trainer.max_epochs=1", f"run_dir={folder}"]))
    return json.loads(Path(folder, "result.json").read_text())


@pytest.mark.parametrize(
    "words",
    [
        ("strategy=dp", "accelerator=late", "devices=2"),
        ("strategy=dp", "devices=[late:0,late:1]"),
        ("strategy=dp", "accelerator=auto", "devices=2"),
        # Failed before, as on a GPU: micro-batches of evaluation wait on the host, and are tensors of inference mode.
        ("strategy=model_parallel", "strategy.num_microbatches=2", "accelerator=late", "devices=2"),
    ],
)
def test_the_command_trains_on_it(words: tuple[str, ...], tmp_path: Path) -> None:
    result = late_device.run(_command, str(tmp_path / "run"), *words)
    assert result["devices"][:2] == ["late:0", "late:1"]
