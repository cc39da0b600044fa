"""A whole checkpoint cut into the files of ranks."""
