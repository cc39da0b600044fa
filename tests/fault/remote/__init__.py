"""Fault injection at the server: every answer to a command goes wrong once, and what is left is examined."""
