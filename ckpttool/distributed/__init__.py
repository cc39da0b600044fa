"""What ranks do together: collectives, transport, rows gathered exactly once."""
