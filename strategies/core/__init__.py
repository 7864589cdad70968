"""Foundations of every room: errors, type aliases, devices, executor, random state, and the contract with the loop.

Exports: errors, types, devices, executor, side_streams, rng, loop_contract,
    optimizer_states, module_checks, module_log, module_state,
    lightning_names, mixed_devices, patching, files, no_value, options.
May import: nothing of this project.
"""
