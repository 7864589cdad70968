"""Decide which rank reads which sample.

Exports: loaders, combined, shares, loss_check, sampling, streams, predictions.
May import: core, batch.
"""
