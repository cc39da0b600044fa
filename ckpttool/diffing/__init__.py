"""How two checkpoints differ, by name and value"""
