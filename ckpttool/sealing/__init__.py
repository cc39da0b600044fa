"""The SHA-256 of each tensor and each file of a model, beside it: written, and compared by verify"""
