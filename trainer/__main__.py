"""`python -m evener.trainer`: the command of `train.py`, from any directory."""

from .cli.main import main

main()
