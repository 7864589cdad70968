"""`python -m evener.trainer`: the command of `train.py`, from any directory."""

from .command import main

main()
