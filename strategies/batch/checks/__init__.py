"""Check in a run's first step that parts of a batch train as the whole batch would.

Exports: loss_check, state_watch.
May import: batch, core.
"""
