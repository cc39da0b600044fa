"""NumPy's .npy and .npz files, read"""
