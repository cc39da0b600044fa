"""LoRA adapters added to the model they were trained on, and extracted from what training changed"""
