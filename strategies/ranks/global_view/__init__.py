"""Ranks that train as one device: tensors of which each holds some rows, and operations that mean all of them.

Exports: view.
May import: all other rooms of strategies/.
"""
