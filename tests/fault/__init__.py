"""Fault injection: every system call of a command that writes fails once, and the files are examined."""
