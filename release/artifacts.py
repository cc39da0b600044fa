"""What goes out, built into dist/: the sdist, from it the wheel, and from that a zipapp (`make zipapp`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"


def build() -> Path:
    """Build the sdist, and from it the wheel, in the place of earlier ones; return the wheel."""
    for path in DIST.glob("ckpttool*"):
        path.unlink()
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)
    return next(DIST.glob("ckpttool-*.whl"))


def zipapp(wheel: Path) -> Path:
    """Put a wheel and what it needs into one file, for a machine with Python and without pip; return it.

    Compiled libraries are in it, so it is for machines like this one, and for this version of Python.
    """
    path = DIST / "ckpttool.pyz"
    python = ["--python", "/usr/bin/env python3", "--compressed"]
    run(sys.executable, "-m", "shiv", "--console-script", "ckpttool", "-o", path, *python, "--quiet", wheel)
    return path


def run(*words: object) -> None:
    """Run a program; raise SystemExit with what it printed if it fails."""
    ran = subprocess.run(
        [*map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if ran.returncode:
        raise SystemExit(f"{ran.stdout}failed: {' '.join(map(str, words))}")


if __name__ == "__main__":
    print(zipapp(build()))
