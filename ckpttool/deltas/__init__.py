"""What changed between two checkpoints, as a file of tensors: written, and read as the newer of the two"""
