"""The command: read the command line, run the mode, show the result.

Exports: main, tool, train.
May import: every other room, except loops, logging and callbacks.
"""
