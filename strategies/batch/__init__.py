"""Cut a batch into chunks and combine what the chunks return and log.

Exports: policies, chunks, losses, loss_weight, outputs, log_recorder.
May import: core.
"""
