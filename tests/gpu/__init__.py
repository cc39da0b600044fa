"""What only a GPU can show: `make gpu` runs it, and writes docs/gpu.md."""
