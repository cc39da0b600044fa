"""What is in a checkpoint and how two differ: summary, statistics, compare, verify; writes nothing."""
