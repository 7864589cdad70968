"""Train any LightningModule: `python train.py strategy=ddp devices=2`; `python train.py --help` lists the options."""

from evener.trainer import Trainer  # pyright: ignore[reportMissingImports]  # installed by an import hook

__all__ = ["Trainer"]
