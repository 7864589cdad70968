"""Checkpoints from late devices: written while training goes on, and continued on them and on a CPU."""

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import late_device
import pytest
import pytorch_lightning as pl
import torch
from late_device import Delays, needs_late_device
from parity import CASES, Case, Net, make_module, make_trainer
from torch import Tensor

from evener.strategies import DataParallelStrategy, ModelParallelStrategy, SingleDeviceStrategy
from evener.trainer.checkpoint import Checkpoint
from evener.trainer.checkpoint.checkpoint_io import MEMORY, discard, saved_in_memory
from evener.trainer.checkpoint.file_io import read

pytestmark = needs_late_device

CASE, TWO = CASES["ragged"], ["late:0", "late:1"]


class Keeps(pl.Callback):
    """Copies the weights after every step, on their devices; may end a run by an error."""

    def __init__(self, last: int) -> None:
        self.at: dict[int, dict[str, Tensor]] = {}
        self.last = last

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.at[trainer.global_step] = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
        if trainer.global_step == self.last:
            raise InterruptedError


def _saved(folder: str, in_memory: bool) -> tuple[int, list[str]]:
    warnings.simplefilter("ignore")
    late_device.set_delays(Delays(kernel=1e-3, copy=5e-3))
    kept, differ, num = Keeps(4 if in_memory else -1), list[str](), 0
    files: Any = {"every_n_steps": 2, "save_top_k": -1, "background": True}
    snapshots: Any = {"every_n_epochs": 1, "snapshot_every_n_steps": 1}
    for strategy in (SingleDeviceStrategy("late:0"), ModelParallelStrategy(TWO, num_microbatches=2)):
        place = Path(folder, type(strategy).__name__)
        saving = Checkpoint(dirpath=place, **(snapshots if in_memory else files))
        options: Any = {"callbacks": [saving, kept], "enable_checkpointing": True}
        with pytest.raises(InterruptedError) if in_memory else nullcontext():
            make_trainer(CASE, strategy, accelerator="late", devices=1, **options).fit(make_module(CASE), CASE.loader())
        for file in [saved_in_memory(place)] if in_memory else sorted(place.glob("*.ckpt")):
            assert file is not None
            saved, num = read(file), num + 1
            own = kept.at[saved["global_step"]]
            differ += [f"{file.name}: {k}" for k, v in saved["state_dict"].items() if not torch.equal(v, own[k].cpu())]
        discard(place)
    return num, differ


IN_MEMORY = pytest.param(True, marks=pytest.mark.skipif(not MEMORY.is_dir(), reason="this system has no /dev/shm"))


@pytest.mark.parametrize("in_memory", [False, IN_MEMORY])
def test_what_is_saved_while_training_goes_on_has_the_weights_of_its_step(in_memory: bool, tmp_path: Path) -> None:
    num, differ = late_device.run(_saved, str(tmp_path), in_memory)
    assert num >= (2 if in_memory else 4)
    assert differ == []


def _continued(folder: str) -> list[float]:
    warnings.simplefilter("ignore")

    def trained(strategy: Any, accelerator: str, max_epochs: int, source: str = "") -> Tensor:
        trainer = make_trainer(CASE, strategy, accelerator=accelerator, devices=1, max_epochs=max_epochs)
        trainer.fit(
            module := make_module(CASE), CASE.loader(), ckpt_path=(source and f"{folder}/{source}.ckpt") or None
        )
        trainer.save_checkpoint(f"{folder}/{accelerator}.ckpt")
        return torch.cat([p.detach().cpu().flatten() for p in module.parameters()])

    whole = trained(SingleDeviceStrategy(), "cpu", 4)
    trained(DataParallelStrategy(TWO), "late", 2)
    on_cpu = trained(SingleDeviceStrategy(), "cpu", 4, "late")
    trained(SingleDeviceStrategy(), "cpu", 2)
    on_stages = trained(ModelParallelStrategy(TWO, num_microbatches=2), "late", 4, "cpu")
    return [float((weights - whole).abs().max()) for weights in (on_cpu, on_stages)]


def test_training_goes_on_where_it_stopped_between_late_devices_and_a_cpu(tmp_path: Path) -> None:
    assert max(late_device.run(_continued, str(tmp_path))) <= 1e-10


class HookedNet(Net):
    """Has a hook of its own, so that its micro-batches run one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda *_: None)


def _resumed(folder: str, kind: type[Net], schedule: Any) -> bool:
    warnings.simplefilter("ignore")
    late_device.set_delays(Delays(kernel=1e-3, copy=2e-3, seed=1))
    case = Case(kind, num=24, batch_size=8)

    def trained(ckpt_path: str | None) -> dict[str, Tensor]:
        module, saving = make_module(case), Checkpoint(dirpath=folder, every_n_steps=1, save_top_k=-1)
        strategy = ModelParallelStrategy(TWO, num_microbatches=4, schedule=schedule)
        shown: dict[str, Any] = {"callbacks": [saving], "enable_checkpointing": True, "devices": 1}
        make_trainer(case, strategy, accelerator="late", **shown).fit(module, case.loader(), ckpt_path=ckpt_path)
        return {key: value.cpu() for key, value in module.state_dict().items()}

    whole = trained(None)
    (file,) = (path for path in Path(folder).glob("*.ckpt") if torch.load(path)["global_step"] == 2)
    resumed = trained(str(file))
    return all(torch.equal(whole[key], resumed[key]) for key in whole)


@pytest.mark.parametrize("kind", [Net, HookedNet])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_resumed_run_adds_gradients_in_the_same_order_from_its_first_step_on(
    kind: type[Net], schedule: str, tmp_path: Path
) -> None:
    # Failed before: the first step, which is watched, went backward from the first micro-batch on.
    assert late_device.run(_resumed, str(tmp_path), kind, schedule)
