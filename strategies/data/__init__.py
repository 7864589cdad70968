"""Decide which rank reads which sample.

Exports: loaders, shares, sampling, streams.
May import: core, batch.
"""
