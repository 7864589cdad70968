"""Copies of a module on several devices of one process.

Exports: layout, runner, replicas, manual, measurement, functional (the public primitives).
May import: core, batch.
"""
