"""Decide which rank reads which sample.

Exports: loaders, combined, sampling, streams, predictions.
May import: core, batch.
"""
