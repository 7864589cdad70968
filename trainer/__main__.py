"""Run the command line of `train.py` from any directory: `python -m evener.trainer`."""

from .cli.main import main

main()
