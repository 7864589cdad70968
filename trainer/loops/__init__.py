"""Run Lightning's loops without the calls that have no effect.

Exports: lean, loops, evaluation_loops, log_method, explained_errors, progress_bar, accumulation.
May import: checkpoint, logging.
"""
