"""Train any LightningModule: `python train.py strategy=ddp devices=2`; `python train.py --help` lists the options."""

from evener.trainer import main

if __name__ == "__main__":
    main()
