"""What scripts may rely on in the JSON of each command: its fields, as a JSON Schema."""
