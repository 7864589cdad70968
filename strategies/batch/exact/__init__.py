"""Make parts of a batch train, and log, exactly what the whole batch would, and verify that they do.

Exports: plans, loss_reader, values, trial, verifier.
May import: batch, core.
"""
