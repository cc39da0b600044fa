"""Conversions in parts, which any engine carries to its machines: torchrun, Slurm, Kubernetes, Dask, Ray."""
