"""The lean loops: Lightning's loops without the calls that nobody needs.

Exports: loops, log_method, out_of_memory, progress_bar, accumulation.
May import: checkpoint, logging.
"""
