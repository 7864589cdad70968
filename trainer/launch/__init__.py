"""Start the processes of a run, or detect that a launcher has started them.

Exports: launcher, environment, cluster, worker.
May import: job, config.
"""
