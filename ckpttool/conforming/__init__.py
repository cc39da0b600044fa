"""A checkpoint's tensors under the names and shapes of another, found from names and shapes"""
