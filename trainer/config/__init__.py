"""Check a configuration and build what it names.

Exports: checks, missing_values, group_files, descriptions, nearest, instantiate.
May import: nothing else in the trainer.
"""
