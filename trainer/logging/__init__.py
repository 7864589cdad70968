"""Store logged values and synchronize them between ranks.

Exports: connector, results, entries, slots, collection_slot.
May import: nothing else in the trainer.
"""
