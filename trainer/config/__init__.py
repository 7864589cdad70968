"""Check a configuration and build what it names.

Exports: checks, group_files, plain_values.
May import: nothing else in the trainer.
"""
