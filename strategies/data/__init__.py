"""Decide which rank reads which sample.

Exports: loaders, combined, shares, sampling, streams, torch_loader.
May import: core, batch.
"""
