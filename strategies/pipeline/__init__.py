"""Cut one copy of a module into stages, and a batch into micro-batches.

Exports: layout, stages, options, module_parts, recompute, schedule.
May import: core, batch.
"""
