"""Run Lightning's loops without the calls that have no effect.

Exports: loops, evaluation_loops, step_plan, train_step, explained_errors.
May import: checkpoint, logging.
"""
