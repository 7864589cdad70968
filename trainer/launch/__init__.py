"""Start the processes of a run, or detect that a launcher has started them.

Exports: launcher, cluster.
May import: job, config.
"""
