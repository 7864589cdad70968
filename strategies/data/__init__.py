"""Decide which rank reads which sample.

Exports: loaders, sampling, streams, predictions.
May import: core, batch.
"""
