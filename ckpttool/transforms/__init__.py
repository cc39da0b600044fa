"""Checkpoint to Checkpoint: names, selection, layout, architecture, numbers, optimizers, LoRA, averages."""
