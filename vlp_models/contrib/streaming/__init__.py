"""Shards that training reads by the block, from a folder or an object store: `trainer.stream.address`."""
