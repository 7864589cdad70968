"""Run Lightning's loops without the calls that have no effect.

Exports: loops, evaluation_loops, step_plan, train_step.
May import: checkpoint, logging.
"""
