"""Run Lightning's loops without the calls that have no effect.

Exports: lean, loops, evaluation_loops, log_method, out_of_memory, progress_bar, accumulation.
May import: checkpoint, logging.
"""
