"""torch's own formats: zip, legacy, tar, TorchScript"""
