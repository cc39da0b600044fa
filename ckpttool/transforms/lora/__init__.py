"""LoRA adapters added to the model they were trained on."""
