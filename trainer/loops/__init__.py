"""Run Lightning's loops without the calls that have no effect.

Exports: hook_plan, loops, evaluation_loops, explained_errors, accumulation.
May import: checkpoint, logging.
"""
