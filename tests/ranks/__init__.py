"""Tests that need several processes, and the pool of ranks that runs them."""
