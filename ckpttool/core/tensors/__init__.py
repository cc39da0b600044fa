"""A tensor as a place in a file: dtypes, references, views, casts, joined chunks, mapping into torch"""
