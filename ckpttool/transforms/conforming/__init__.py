"""The one way from a checkpoint's tensors to the names and shapes of another, found from names and shapes."""
