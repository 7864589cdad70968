"""Train a library's module with the Trainer of the Lightning that it imports, and with ours; say what became of it.

`python tests/libraries/libraries.py chemprop` prints a row of the table, in an environment that has chemprop.
"""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

# evener before any library, so that one that imports `lightning` finds what evener makes of that name
from evener.strategies import (
    BalancedDataParallelStrategy,
    DataParallelStrategy,
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from evener.trainer import Trainer

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "support")]

import torch  # noqa: E402
from distributed import run_ranks  # noqa: E402
from library_cases import CASES  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

STRATEGIES: dict[str, Any] = {
    "single_device": lambda: (SingleDeviceStrategy(), 1),
    "dp": lambda: (DataParallelStrategy(), 2),
    "balanced_dp": lambda: (BalancedDataParallelStrategy(gpu0_chunk=1), 2),
    "ddp": lambda: (DDPStrategy(batch_size_is="global"), 2),
    "fsdp": lambda: (FSDPStrategy(batch_size_is="global"), 2),
    "model_parallel": lambda: (ModelParallelStrategy(), 2),
}
TOLERANCE = 1e-10


class Trained(NamedTuple):
    """What a training left behind, or the error that ended it."""

    weights: dict[str, torch.Tensor]
    metrics: dict[str, float]
    error: str = ""
    num_steps: int = 0


def name_of_lightning(module: Any) -> str:
    """`lightning` or `pytorch_lightning`: where the module's base class comes from."""
    base = next(item for item in type(module).__mro__ if item.__name__ == "LightningModule")
    return base.__module__.partition(".")[0]


def lightnings_trainer(module: Any) -> Any:
    base = next(item for item in type(module).__mro__ if item.__name__ == "LightningModule")
    package = sys.modules[".".join(base.__module__.split(".")[: 2 if name_of_lightning(module) == "lightning" else 1])]
    return package.Trainer


def train(library: str, strategy: str) -> Trained:
    """Train two epochs in float64. Runs in every rank."""
    warnings.simplefilter("ignore")
    for name in ("pytorch_lightning", "lightning", "lightning.pytorch", "lightning_fabric", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    module, data = CASES[library]()
    module = module.double()
    make: Any = lightnings_trainer(module) if strategy == "lightning" else Trainer
    chosen, num_devices = ("auto", 1) if strategy == "lightning" else STRATEGIES[strategy]()
    trainer = make(
        strategy=chosen, devices=num_devices, accelerator="cpu", max_epochs=2, num_sanity_val_steps=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(module, **data)
    except Exception as exc:  # noqa: BLE001  # a row of the table, whatever it is
        return Trained({}, {}, f"{type(exc).__name__}: {' '.join(str(exc).split())}", trainer.global_step)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items() if not key.endswith("_step")}
    tensors = {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in module.state_dict().items()
        if isinstance(value, torch.Tensor) and value.numel()
    }
    return Trained({key: value.clone() for key, value in tensors.items()}, metrics, "", trainer.global_step)


def train_with(library: str, strategy: str) -> Trained:
    """Rank 0's training, or the first that failed."""
    if strategy not in ("ddp", "fsdp"):
        return train(library, strategy)
    ranks = run_ranks(train, 2, library, strategy, timeout_s=180)
    found = next((rank for rank in ranks if rank.error), ranks[0])
    return found._replace(metrics={key: value for key, value in found.metrics.items() if not of_a_step(key)})


def of_a_step(key: str) -> bool:
    """What training logs of steps only, as torchgeo and anomalib do, is under ranks the rank's own."""
    return key.startswith("train_") and not key.endswith("_epoch")


def verdict(found: Trained, expected: Trained) -> str:
    if expected.error:
        return f"not on its own Lightning either: {expected.error[:300]}"
    if found.error:
        return f"{'refused' if not found.num_steps else f'ended after {found.num_steps} steps'}: {found.error[:300]}"
    for kind, got, want in (("weight", found.weights, expected.weights), ("value", found.metrics, expected.metrics)):
        missing = {key for key in got.keys() ^ want.keys() if not of_a_step(key)}
        if missing:
            return f"WRONG: other {kind}s: {sorted(missing)}"
        worst = max(got, key=lambda key: float((torch.as_tensor(got[key]) - torch.as_tensor(want[key])).abs().max()))
        try:
            torch.testing.assert_close(got[worst], want[worst], rtol=TOLERANCE, atol=TOLERANCE)
        except AssertionError as exc:
            return f"WRONG: {kind} {worst}: {' '.join(str(exc).split())[:200]}"
    return "equal"


def main() -> None:
    for library in sys.argv[1:]:
        module, _ = CASES[library]()
        expected = train_with(library, "lightning")
        row = [verdict(train_with(library, strategy), expected) for strategy in STRATEGIES]
        sys.stdout.write(f"| {library} | {name_of_lightning(module)} | {' | '.join(row)} |\n")


if __name__ == "__main__":
    main()
