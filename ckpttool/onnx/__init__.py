"""ONNX models, read"""
