"""Optimizer state keyed by index or by name, and for another order of parameters"""
