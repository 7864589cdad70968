"""Decide which rank reads which sample.

Exports: loaders, combined, shares, sampling, streams.
May import: core, batch.
"""
