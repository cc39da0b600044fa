"""Every byte read: structure, checksums, non-finite values; and the digest of a state"""
