"""Shards with an index, in the layout of the Hugging Face Hub."""
