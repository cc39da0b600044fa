"""A tensor as a place in a file: dtypes, references, strided views, casts, joined chunks, mapping into torch."""
