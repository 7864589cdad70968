"""Store logged values and synchronize them between ranks.

Exports: connector, results, entries, slots.
May import: nothing else in the trainer.
"""
