"""safetensors files: read strictly, written as the library writes them."""
