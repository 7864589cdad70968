"""Run variants of one configuration, and show their results in one table: sweeps, searches, and mode=compare.

Exports: sweep, search, compare.
May import: launch, job, callbacks, config.
"""
