"""What was read from a file: the tree of values, the model states in it, their names, optimizers"""
