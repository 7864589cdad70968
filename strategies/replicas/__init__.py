"""Copies of a module on several devices of one process.

Exports: layout, runner, replicas, measurement, functional (the public primitives).
May import: core, batch.
"""
