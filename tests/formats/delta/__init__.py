"""Deltas: what changed between two checkpoints, written and read."""
