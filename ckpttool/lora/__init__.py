"""LoRA adapters: added to a model, extracted from what training changed, written for other programs"""
