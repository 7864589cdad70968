"""Cut one copy of a module into stages, and a batch into micro-batches.

Exports: layout, stages, plan, microbatches, recompute.
May import: core, batch.
"""
