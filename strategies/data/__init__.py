"""Decide which rank reads which sample.

Exports: loaders, shares, sampling, streams, torch_loader.
May import: core, batch.
"""
