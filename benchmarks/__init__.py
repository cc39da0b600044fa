"""Side by side with what a user would use instead: `make bench`, or `python -m benchmarks --help`.

A benchmark is a name, a setup, and several ways to do one job. The ways run in turns (A B C D, A B C D, …),
each in its own process, so that a busy minute of the machine affects all of them; what counts is the ratio
within a round. Nothing here is a test: a missed target is printed, and the exit code stays 0.
"""
