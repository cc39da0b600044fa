"""An exact data-parallel trainer; start with `train/main.py`."""

import os
import sys

from ckpttool.core.system import IS_POSIX

if not IS_POSIX:
    sys.stderr.write("error: the trainer runs on Linux\nhint: on Windows, run it in WSL\n")
    raise SystemExit(2)

# `python train/main.py` puts this folder first on the import path, where its data/, config/ and run/ would
# stand before the user's own data.py, config.py and run.py. The ranks and loading processes of a run start
# with this path, or come here too.
_HERE = os.path.dirname(os.path.realpath(__file__))
sys.path[:] = [folder for folder in sys.path if not folder or os.path.realpath(folder) != _HERE]
