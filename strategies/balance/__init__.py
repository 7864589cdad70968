"""Measure devices and ranks, and solve for their shares of the batch.

Exports: ranks, controller.
May import: core, batch.
"""
