"""Files that ranks wrote, each its own: DTensors, ShardedTensors, pieces of Hugging Face."""
