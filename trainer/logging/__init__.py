"""Store logged values and synchronize them between ranks.

Exports: connector, results, series, exchange.
May import: nothing else in the trainer.
"""
