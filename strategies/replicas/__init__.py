"""Copies of a module on several devices of one process.

Exports: layout, runner, replicas.
May import: core, batch.
"""
