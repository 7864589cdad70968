"""Cut each parameter of a module over the ranks, with torch's FSDP2, and put whole tensors together again.

Exports: sharded_module, parts, part_calls, whole, whole_calls, placed, deferred, originals, refusals; optimizer_shards,
device_shards.
May import: batch, core.
"""
