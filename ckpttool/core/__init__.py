"""What every room stands on: tensors, files, pickles, checkpoints, opening and saving, and the shell"""
