"""Cut a batch into chunks and combine what the chunks return and log.

Exports: layout, one_process, policies, batch_dims, structure, results, run_structures, evidence, tree; losses,
collected, given_sizes, outputs, log_recorder, metric_calls; checks.
May import: core.
"""
