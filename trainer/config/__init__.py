"""Check a configuration and build what it names.

Exports: checks, composing.
May import: nothing else in the trainer.
"""
