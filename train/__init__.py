"""An exact data-parallel trainer; start with `train/main.py`."""
