"""Compute metrics of torchmetrics over all ranks, exactly and in the order of one device.

Exports: states, steps, sync.
May import: distributed, core.
"""
