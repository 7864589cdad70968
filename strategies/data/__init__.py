"""Decide which rank reads which sample.

Exports: loaders, sampling, streams.
May import: core, batch.
"""
