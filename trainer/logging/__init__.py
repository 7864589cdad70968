"""Store logged values and synchronize them between ranks.

Exports: connector, entries, slots, step_sync.
May import: nothing else in the trainer.
"""
