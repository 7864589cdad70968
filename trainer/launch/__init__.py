"""Start the processes of a run, or detect that a launcher has started them.

Exports: launcher, environment, cluster, worker, workers.
May import: job, config.
"""
