"""What is in a checkpoint: summary, tables, statistics"""
