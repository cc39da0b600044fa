"""Files that many ranks wrote, merged and split: DTensors, FSDP, DeepSpeed, pieces of Hugging Face"""
