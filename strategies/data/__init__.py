"""Decide which rank reads which sample.

Exports: loaders, combined, shares, sampling, streams, predictions.
May import: core, batch.
"""
