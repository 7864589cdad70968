"""mode=compare: train a few steps with every strategy and compare losses and speed.

Exports: compare, table, trial, trial_process (the entry point of a trial's process).
May import: launch, job, config.
"""
