"""Cut a batch into chunks and combine what the chunks return and log.

Exports: layout, one_process, policies, batch_dims, structure, results, run_structures, samples, tree; losses,
evaluation_lists, part_lists, log_recorder, part_metrics; exact, whole.
May import: core.
"""
