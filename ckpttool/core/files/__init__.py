"""Bytes from file to file: copying, checksums, threads, signals, the atomic commit of a file or a folder"""
