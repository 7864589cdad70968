"""Foundations of every room: errors, type aliases, devices, executor, random state, and the contract with the loop.

Exports: errors, types, devices, device_names, executor, side_streams, rng, loop_contract,
<<<<<<< HEAD
    optimizer_states, module_checks, torch_loader, batch_readers,
    lightning_names, patching, scratch, text_table, user_code, no_value.
=======
    optimizer_states, module_checks,
    lightning_names, patching, scratch, text_table, user_code, no_value, torch_loader, batch_readers.
>>>>>>> 150f4674f7e5d44a456f6a4880c80d327a902c15
May import: nothing of this project.
"""
