"""Scanners of pickles compared on one corpus of attacks and honest files: `python -m tests.scanners`."""
