"""Run a job in one process: build the objects, train, and write the result.

Exports: run, result, log_file.
May import: callbacks, checkpoint, loggers, config.
"""
