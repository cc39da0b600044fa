"""The commands: each parses, calls the library and prints; those of one idea share a file."""
