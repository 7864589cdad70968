"""What ranks do together: start, meet, sum, stop at one step, and name the one that fails.

Exports: base, options, wrapper, store, environment, device_blocks, side_group, sync_batchnorm, zero_weight_step,
    process_exit.
May import: core.
"""
