"""Checkpoints of several files: shards with an index, DCP folders."""
