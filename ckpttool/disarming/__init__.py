"""Checkpoints of tensors and plain values alone, in place of objects"""
