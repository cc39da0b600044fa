"""A page of HTML about a checkpoint, a difference or a run: one file, which opens without a network"""
