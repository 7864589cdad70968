"""Check a configuration and build what it names.

Exports: checks, missing_values, instantiate.
May import: nothing else in the trainer.
"""
