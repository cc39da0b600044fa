"""Optimizer state keyed by index or by name, and the parameters it belongs to."""
