"""Checkpoint to Checkpoint, pure: keys, selection, layout, optimizer state, averages."""
