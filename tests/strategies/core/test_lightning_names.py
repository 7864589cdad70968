"""`lightning.pytorch` and `pytorch_lightning` are one package, whichever was imported first and whichever is installed.

Each case runs in a process of its own, since what was imported before decides; it is forked from one that has imported
their libraries, but neither of them.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
import warm_python

from evener.strategies.core import lightning_names

MODULE = """
import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(40.0).view(10, 4) / 40), batch_size=3)


class Count(Callback):
    batches = 0

    def on_train_batch_end(self, *args):
        self.batches += 1
"""

TRAIN = """
import pickle, warnings
warnings.simplefilter("ignore")
from evener.trainer import Trainer
import torch, written
import pytorch_lightning, lightning.pytorch, lightning.fabric, lightning_fabric
assert pytorch_lightning is lightning.pytorch and lightning_fabric is lightning.fabric
import pytorch_lightning.callbacks as ours
import lightning.pytorch.callbacks as theirs
assert ours is theirs and ours.__spec__.name == ours.__name__
assert isinstance(written.Net(), pytorch_lightning.LightningModule)
assert pickle.loads(pickle.dumps(pytorch_lightning.LightningModule)) is lightning.pytorch.LightningModule
quiet = dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
weights = []
for strategy, devices in (("single_device", 1), ("dp", 2)):
    torch.manual_seed(0)
    net, count = written.Net(), written.Count()
    trainer = Trainer(strategy=strategy, devices=devices, max_epochs=1, callbacks=count, **quiet)
    trainer.fit(net, datamodule=written.Data())
    assert count.batches == 4
    weights.append(net.layer.weight.detach().clone())
assert torch.allclose(*weights, atol=1e-6)
trainer.save_checkpoint("net.ckpt")
with open("objects.pickle", "wb") as file:
    pickle.dump((net.cpu(), count, ours.EarlyStopping("loss")), file)
print("trained with", pytorch_lightning.__name__)
"""

HIDE = """
import importlib.machinery
find = importlib.machinery.PathFinder.find_spec
def hiding(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in {hidden} else find(name, path, target)
importlib.machinery.PathFinder.find_spec = classmethod(hiding)
"""

LIGHTNING, STANDALONE = {"lightning"}, {"pytorch_lightning", "lightning_fabric"}

LOAD = """
import pickle
from evener.trainer import Trainer
import pytorch_lightning
import torch, written
quiet = dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(max_epochs=2, enable_checkpointing=False, **quiet)
trainer.fit(written.Net(), datamodule=written.Data(), ckpt_path="net.ckpt", weights_only=True)
width = written.Net.load_from_checkpoint("net.ckpt", weights_only=True).hparams.width
print("resumed at", trainer.current_epoch, width)
with open("objects.pickle", "rb") as file:
    net, count, stopping = pickle.load(file)
assert type(net) is written.Net and type(stopping) is pytorch_lightning.callbacks.EarlyStopping
print("unpickled", count.batches)
"""


def python(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run Python on a script in a folder that has the module `written`."""
    (folder / "written.py").write_text(MODULE)
    variables = {**os.environ, "PYTHONPATH": str(folder), "PYTHONWARNINGS": "ignore"}
    return warm_python.run("-c", script, cwd=folder, env=variables, without_lightning=True)


TRAINER_ALONE = """
import sys
import evener.trainer
assert "evener.strategies" not in sys.modules
import lightning as L, pytorch_lightning as pl
from evener.strategies.core import lightning_names
assert lightning_names is sys.modules["evener.strategies.core.lightning_names"]
print(L.LightningModule is pl.LightningModule, sum(type(finder).__name__ == "_AliasFinder" for finder in sys.meta_path))
"""
NOTHING = """
import evener.trainer
from importlib.util import find_spec
print(find_spec("lightning.pytorch.nothing"), find_spec("lightning.pytorch.cli").name)
import lightning.pytorch.nothing
"""
ROOM = "from evener.trainer.cli import train\nprint(train.ClusterEnvironment.__module__)"
BOTH_BEFORE = """
import pytorch_lightning, lightning
from evener.trainer import Trainer
import written
Trainer(accelerator="cpu", logger=False).fit(written.Net(), written.Data())
"""
REFUSED = (
    "Net derives from lightning's LightningModule, and Evener runs pytorch_lightning here, which is a different "
    "package. Import evener before either of them"
)
OLD = """
import pytorch_lightning
pytorch_lightning.__version__ = "2.5.2"
from evener.trainer import Trainer
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "told", "error"),
    [
        # it did so when `Trainer` was first used: modules of `import evener.trainer; import lightning` were refused
        (TRAINER_ALONE, "True 1\n", ""),
        # `find_spec`, by which libraries ask for optional parts, found whatever began with the other name
        (NOTHING, "None lightning.pytorch.cli\n", "No module named 'lightning.pytorch.nothing'"),
        # `python train.py` ended in "No module named 'pytorch_lightning'" where only lightning is installed
        ("hidden" + ROOM, "lightning.fabric.", ""),
        (BOTH_BEFORE, "", REFUSED),
        (OLD, "", "but 2.5.2 is installed"),
    ],
    ids=["before torch", "not there", "only lightning", "both before", "an old version"],
)
def test_what_is_imported_and_refused(script: str, told: str, error: str, tmp_path: Path) -> None:
    script = script.replace("hidden", HIDE.format(hidden=STANDALONE))
    ended = python(tmp_path, script)
    assert ended.stdout.startswith(told), ended.stderr
    assert error in ended.stderr
    assert (ended.returncode != 0) == bool(error), ended.stderr


LOGGERS = """
import logging
{before}
import evener.strategies
quiet = logging.getLogger("{other}")
import pytorch_lightning, lightning.pytorch, lightning.fabric
assert quiet is logging.getLogger("lightning.pytorch") is logging.getLogger("pytorch_lightning")
assert logging.getLogger("lightning.fabric") is logging.getLogger("lightning_fabric")
pytorch_lightning._logger.warning("first")
logging.getLogger("{other}").setLevel(logging.ERROR)
pytorch_lightning._logger.warning("second")
print(quiet.name)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "other", "real"),
    [
        ("", "lightning.pytorch", "pytorch_lightning"),
        ("import lightning", "pytorch_lightning", "lightning.pytorch"),
    ],
    ids=["evener first", "lightning first"],
)
def test_what_is_set_on_a_logger_of_either_name_counts(before: str, other: str, real: str, tmp_path: Path) -> None:
    # `logging.getLogger("lightning.pytorch").setLevel(...)`, as scripts begin, had no effect on pytorch_lightning.
    ended = python(tmp_path, LOGGERS.format(before=before, other=other))
    assert ended.stdout == f"{real}\n", ended.stderr
    assert ended.stderr == "first\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("without", "name", "then_without"),
    [
        (STANDALONE, "lightning.pytorch", LIGHTNING),
        pytest.param(LIGHTNING, "pytorch_lightning", STANDALONE, marks=pytest.mark.slow),
    ],
)
def test_what_is_saved_with_one_name_loads_where_only_the_other_is_installed(
    without: set[str], name: str, then_without: set[str], tmp_path: Path
) -> None:
    saved = python(tmp_path, HIDE.format(hidden=without) + TRAIN)
    assert f"trained with {name}" in saved.stdout, saved.stderr
    loaded = python(tmp_path, HIDE.format(hidden=then_without) + LOAD)
    assert "resumed at 2 4\nunpickled 4" in loaded.stdout, loaded.stderr


def test_supported_versions_are_those_of_the_package() -> None:
    lightning_names.verify_version()
    for version in ("2.5.2", "2.7.0"):  # darts installs the first, on which a run ended in a bare TypeError
        with pytest.raises(ImportError, match=rf">= 2\.6\.6 and < 2\.7, but {re.escape(version)} is installed"):
            lightning_names.verify_version(version)
    low, high = lightning_names.SUPPORTED
    pyproject = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"pytorch-lightning>={low},<{high}"' in pyproject
