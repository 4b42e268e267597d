"""Models that torch's ``fully_shard`` has sharded (FSDP2, HSDP).

``gradients``: hooks between replicas. ``quantized_gradients`` and ``quantized_weights``: few bits
between shards. ``units``: what all of them need of torch, and the only file with its private names.
"""
