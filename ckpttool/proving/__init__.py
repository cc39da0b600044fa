"""The record of a training run, and its replay: whether both hold"""
