"""Cut each parameter of a module over the ranks, with torch's FSDP2, and put whole tensors together again.

Exports: sharded_module, gathered, parts, whole, shard_calls, optimizer_shards.
May import: batch, core.
"""
