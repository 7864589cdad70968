"""mode=compare: train a few steps with every strategy and compare losses and speed.

Exports: compare, table, trial.
May import: launch, job, config.
"""
