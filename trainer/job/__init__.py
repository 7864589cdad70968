"""Run a job in one process: build the objects, train, and write the result.

Exports: run, result, earlier_run, log_file, tuning.
May import: callbacks, checkpoint, loggers, config.
"""
