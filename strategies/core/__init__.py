"""Foundations of every room: errors, type aliases, devices, executor, random state, and the contract with the loop.

Exports: errors, types, devices, executor, transfers, rng, loop_contract, module_checks, module_log, lightning_names,
    patching, files, options.
May import: nothing of this project.
"""
