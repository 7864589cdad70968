"""Measure devices and ranks, and solve for their shares of the batch.

Exports: ranks, controller, checkpointed.
May import: core, batch.
"""
