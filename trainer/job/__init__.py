"""Run a job in one process: build the objects, train, and write the result.

Exports: run, result, earlier_run, log_file, signals, tuning, summary.
May import: callbacks, checkpoint, loggers, config.
"""
