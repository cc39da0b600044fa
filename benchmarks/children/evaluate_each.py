"""`evaluate_each.py MODEL DATA CHECKPOINT…`: `train/evaluate.py` for each, importing torch only once.

The result for `rank0.pt` is in the folder `rank0`, as written by `--out`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from train import evaluate


def main(model: str, data: str, *checkpoints: str) -> int:
    for path in map(Path, checkpoints):
        arguments = [str(path), "--model", model, "--data", data, "--out", str(path.with_suffix(""))]
        code = evaluate.main(arguments)
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
