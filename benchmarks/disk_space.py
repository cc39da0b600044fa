"""Where to put the files of a benchmark, and whether there is space for them."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from .case import Need
from .sizes import show_size

SPARE = 1 << 30
"""Bytes of memory left for everything else on the machine."""

IN_MEMORY = ("tmpfs", "ramfs")


def choose_folder(files: int) -> tuple[Path, str]:
    """A folder for that many bytes of files, and a remark on the choice.

    A tmpfs if one is large enough: a disk's speed would hide the difference between the ways.
    """
    free = {path: shutil.disk_usage(path).free for path in _writable(IN_MEMORY)}
    best = max(free, key=lambda path: free[path], default=None)
    if best is not None and free[best] >= files:
        return best, ""
    folder = Path(tempfile.gettempdir())
    found = "no tmpfs here" if best is None else f"the largest tmpfs has only {show_size(free[best])} free"
    return folder, f"{found}: using the temporary folder instead"


def in_memory(folder: Path) -> bool:
    return file_system(folder) in IN_MEMORY


def file_system(folder: Path) -> str:
    """The type of the file system a folder is on; `?` if the system does not report it."""
    here = os.path.realpath(folder)
    inside = [(len(point), kind) for kind, point in _mounts() if os.path.commonpath([point, here]) == point]
    # Of two mounts on one mount point, the later hides the earlier.
    return max(reversed(inside), key=lambda mount: mount[0])[1] if inside else "?"


def shortage(need: Need, folder: Path) -> str:
    """Why there is not enough space for a benchmark; empty if there is."""
    free = shutil.disk_usage(folder).free
    if need.files > free:
        return f"it needs {show_size(need.files)} of files, and {show_size(free)} are free"
    memory = need.memory + SPARE
    if in_memory(folder):
        memory += need.files
    available = available_memory()
    if available is not None and memory > available:
        return f"it needs {show_size(memory)} of memory, and {show_size(available)} are available"
    return ""


def available_memory() -> int | None:
    """Bytes that processes can still allocate; None if the system does not report it."""
    return _memory("MemAvailable")


def total_memory() -> int | None:
    return _memory("MemTotal")


def _memory(field: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), None)


def _mounts() -> list[tuple[str, str]]:
    """(type, mount point) of every mount, in the order of mounting."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return []
    fields = [line.split() for line in lines]
    return [(kind, point.replace("\\040", " ")) for _, point, kind, *_ in fields]


def _writable(kinds: tuple[str, ...]) -> list[Path]:
    return [Path(point) for kind, point in _mounts() if kind in kinds and os.access(point, os.W_OK | os.X_OK)]
