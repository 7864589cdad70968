"""mode=plan: compute memory per device and the largest batch without training.

Exports: plan.
May import: compare, job, config.
"""
