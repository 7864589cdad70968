"""One copy of a module cut into stages, with micro-batches.

Exports: base, layout, options, module_parts, placement_check.
May import: core, batch.
"""
