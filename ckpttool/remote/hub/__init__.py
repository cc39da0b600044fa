"""Repositories of the hub: hf://, by huggingface_hub for tokens, listings and commits"""
