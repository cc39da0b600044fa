"""GGUF files of llama.cpp, read"""
