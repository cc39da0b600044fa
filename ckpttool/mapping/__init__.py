"""Checkpoints in another architecture's names and layout, by rules that a TOML file declares"""
