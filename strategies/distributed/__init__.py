"""Coordinate ranks: start, synchronize, sum, stop at the same step, and name a rank that fails.

Exports: group, same_weights, options, objects, store, environment, sync_batchnorm,
process_exit, processes, survivors, metrics, scripts.
May import: core.
"""
