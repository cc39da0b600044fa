"""The programs that benchmarks run: the tool, the peers, and what the harness itself needs done."""

from __future__ import annotations

import sys
from pathlib import Path

from .process import timed

PYTHON = Path(sys.executable)
PEERS = Path(__file__).with_name("peers")
CHILDREN = Path(__file__).with_name("children")


def tool(*arguments: str | Path) -> list[str | Path]:
    """`ckpttool …`, by the script installed beside this interpreter, as a user types it."""
    script = PYTHON.with_name("ckpttool")
    start: list[str | Path] = [script] if script.exists() else [PYTHON, "-m", "ckpttool"]
    return [*start, *arguments]


def peer(script: str, *arguments: str | Path) -> list[str | Path]:
    """What a user would run instead: a script of `peers/`."""
    return [PYTHON, PEERS / script, *arguments]


def make_checkpoint(path: Path, nbytes: int, tensors: int = 128) -> None:
    """Writes a `.pt` file of that many float32 tensors, `nbytes` together, in a process whose memory goes."""
    timed([PYTHON, CHILDREN / "make_checkpoint.py", path, str(nbytes), str(tensors)])


def make_memory_ready(nbytes: int) -> None:
    """Touches that much memory and gives it back, so that the ways differ by their work alone.

    A virtual machine may hand memory that lay free for two seconds back to its host (free page reporting),
    and whoever asks for it next waits for the host: measured, a `cp` of 4 GB took 3.2 s, and 1.5 s right
    after another. So a way that takes more memory than the one before it pays for more than its work.
    """
    timed([PYTHON, "-I", "-S", CHILDREN / "touch_memory.py", str(nbytes)])
