"""Compute metrics of torchmetrics over all ranks, exactly.

Exports: states, sync.
May import: distributed, core.
"""
