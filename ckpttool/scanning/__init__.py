"""What files of any kind could run when they are unpickled: looked for in all that Python's loaders open"""
