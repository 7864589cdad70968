"""Store logged values and synchronize them between ranks.

Exports: connector, entries, slots.
May import: nothing else in the trainer.
"""
