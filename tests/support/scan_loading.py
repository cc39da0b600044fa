"""Load attacks of the corpus as users would, and say which ran code: `python -m tests.support.scan_loading`.

Reads a JSON object from stdin: title -> [path, how]. Prints a JSON list of the titles whose canary appeared.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any


def _twice(path: str) -> None:
    with open(path, "rb") as file:
        pickle.load(file)
        pickle.load(file)


def _pickle(path: str) -> None:
    with open(path, "rb") as file:
        pickle.load(file)


def _gzip(path: str) -> None:
    with gzip.open(path) as file:
        pickle.load(file)


def _torch(path: str) -> Any:
    import torch

    return torch.load(path, weights_only=False)


def _extra_state(path: str) -> None:
    (state,) = _torch(path).values()
    pickle.loads(state.numpy().tobytes())


def _joblib(path: str) -> None:
    import joblib

    joblib.load(path)


def _numpy(path: str) -> None:
    import numpy as np

    loaded = np.load(path, allow_pickle=True)
    if hasattr(loaded, "files"):
        for name in loaded.files:
            loaded[name]


LOADERS: dict[str, Callable[[str], object]] = {
    "pickle": _pickle,
    "pickle twice": _twice,
    "gzip": _gzip,
    "torch": _torch,
    "extra state": _extra_state,
    "joblib": _joblib,
    "numpy": _numpy,
}


def ran(path: str, how: str) -> bool:
    """Load a file in a new folder; return whether its canary is there."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as null:
        os.chdir(folder)
        with suppress(Exception), redirect_stdout(null), redirect_stderr(null):
            LOADERS[how](path)
        for _ in range(50):  # of a process that was started
            if os.path.exists("canary"):
                break
            time.sleep(0.002)
        found = os.path.exists("canary")
        os.chdir("/")
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    given = json.load(sys.stdin)
    said = json.dumps([title for title, (path, how) in given.items() if ran(path, how)])
    print(said)
