"""Compute metrics of torchmetrics over all ranks, exactly and in the order of one device.

Exports: run, steps, sync, saved.
May import: distributed, core.
"""
