"""Run one rank of a strategy: its steps through a layout, and gradients that are the same on all ranks.

Exports: strategy, step, whole_batches, gradient_sync, shard_sync.
May import: all other rooms of strategies/.
"""
