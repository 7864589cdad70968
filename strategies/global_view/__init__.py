"""Ranks that train as one device: tensors of which each holds some rows, and operations that mean all of them.

Exports `view.GlobalView`. Imports `core`, `batch`, `data` and `distributed`.
"""
