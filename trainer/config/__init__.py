"""Check a configuration and build what it names.

Exports: checks, launch_plan, group_files, descriptions, nearest, instantiate.
May import: nothing else in the trainer.
"""
