"""Make parts of a batch train, and log, exactly what the whole batch would, and verify that they do.

Exports: verifier, comparison, verdict; loss_reader; programs.
May import: batch, core.
"""
