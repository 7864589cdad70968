"""Modules as people write them, trained under every strategy and on one device: `python tests/acceptance/run.py`."""
