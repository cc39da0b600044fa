"""Saving: the format, the plan of one output, and its report."""
