"""Numbers packed in few bits with scales: recognised, made plain, and plain ones packed"""
