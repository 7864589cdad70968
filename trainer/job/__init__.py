"""Run a job in one process: build the objects, train, and write the result.

Exports: run, result, earlier_run, failure, log_file, signals, batch_size_search, hparams_search,
    tables.
May import: callbacks, checkpoint, loggers, config.
"""
