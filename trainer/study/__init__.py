"""Run variants of one configuration, and show their results in one table: sweeps, searches, and mode=compare.

Exports: variants, sweep, search, compare, trial (the entry point of a trial's process).
May import: launch, job, callbacks, config.
"""
