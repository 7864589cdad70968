"""Make parts of a batch train, and log, exactly what the whole batch would, and verify that they do.

Exports: verifier, verdict, cuts; plans, loss_reader; programs, tape, values.
May import: batch, core.
"""
