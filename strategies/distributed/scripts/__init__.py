"""Start the ranks of a plain script or notebook, and bring back what rank 0 has done.

Exports: launcher.
May import: distributed, core.
"""
