"""Cut a batch into chunks, combine what the chunks return and log, and compute what is of the whole batch.

Exports: layout, one_process, policies, structure, results, run_structures; evaluation_lists, log_recorder,
part_metrics; meeting, over_batch; exact.
May import: core.
"""
