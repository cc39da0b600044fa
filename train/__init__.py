"""An exact data-parallel trainer; `train/main.py` is where to begin."""
