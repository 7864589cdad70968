"""Start the processes of a run, or recognise that a launcher has.

Exports: launcher, environment, cluster, worker.
May import: job, config.
"""
