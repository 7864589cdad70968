"""Coordinate ranks: start, synchronize, sum, stop at the same step, and name a rank that fails.

Exports: base, options, wrapper, store, environment, device_blocks, side_group, sync_batchnorm, zero_weight_step,
    metric_sync, process_exit.
May import: core.
"""
