"""Coordinate ranks: start, synchronize, sum, stop at the same step, and name a rank that fails.

Exports: group, objects, store, wrapper, processes, survivors, script_launcher, metrics.
May import: core.
"""
