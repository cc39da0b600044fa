"""The programs that benchmarks run: the tool, its peers, and the harness's own helpers."""

from __future__ import annotations

import sys
from pathlib import Path

from .process import timed

PYTHON = Path(sys.executable)
PEERS = Path(__file__).with_name("peers")
CHILDREN = Path(__file__).with_name("children")


def tool(*arguments: str | Path) -> list[str | Path]:
    """`ckpttool …`, with the script installed next to this interpreter, as a user types it."""
    script = PYTHON.with_name("ckpttool")
    start: list[str | Path] = [script] if script.exists() else [PYTHON, "-m", "ckpttool"]
    return [*start, *arguments]


def cp(source: str | Path, copy: str | Path) -> list[str | Path]:
    """`cp`, which copies the bytes also where files could share them."""
    return ["cp", "--reflink=never", "-r", source, copy]


FLOOR = "bare threads"
"""The name of the way that `bare_copy` is."""


def bare_copy(source: str | Path, *outputs: str | Path) -> list[str | Path]:
    """Threads that read and write blocks and do nothing else: the floor of copying."""
    return [PYTHON, "-I", "-S", CHILDREN / "bare_copy.py", source, *outputs]


def peer(script: str, *arguments: str | Path) -> list[str | Path]:
    """What a user would run instead: a script in `peers/`."""
    return [PYTHON, PEERS / script, *arguments]


def make_checkpoint(path: Path, nbytes: int, tensors: int = 128) -> None:
    """Writes a `.pt` file of `tensors` float32 tensors, `nbytes` in total, in a process that then ends."""
    timed([PYTHON, CHILDREN / "make_checkpoint.py", path, str(nbytes), str(tensors)])


def make_memory_ready(nbytes: int) -> None:
    """Touches that much memory and frees it, so that the ways differ only in their work.

    A virtual machine may return memory that was free for two seconds to its host (free page reporting),
    and the next process that needs it waits for the host: measured, a `cp` of 4 GB took 3.2 s, and 1.5 s
    right after another. So a way that uses more memory than the one before it pays for more than its work.
    """
    timed([PYTHON, "-I", "-S", CHILDREN / "touch_memory.py", str(nbytes)])
