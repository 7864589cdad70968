"""Copies of a module on several devices of one process.

Exports: layout, replicas.
May import: core, batch.
"""
