"""What a table was measured on and with; without that a number means little."""

from __future__ import annotations

import datetime
import os
import platform
import re
from importlib.metadata import version
from pathlib import Path

from .disk_space import file_system, total_memory


def about(folder: Path) -> str:
    """What measurements with files in a folder apply to."""
    return f"{date()}; {versions()}; {size(folder)}"


def date() -> str:
    return datetime.date.today().isoformat()


def versions() -> str:
    """From package metadata: importing torch would make the harness, and so its children, large."""
    kernel = re.match(r"[\d.]*\d", platform.release())
    parts = [f"Python {platform.python_version()}"]
    parts += [f"{name} {version(name)}" for name in ("torch", "safetensors")]
    parts.append(f"{platform.system()} {kernel[0] if kernel else platform.release()}")
    return ", ".join(parts)


def size(folder: Path) -> str:
    """The cores this process may use, the memory, and the file system of the files."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = total_memory()
    parts = [f"{cores} core{'s' * (cores != 1)}"]
    parts += [f"{memory / 2**30:.0f} GiB memory"] if memory else []
    parts.append(file_system(folder))
    return ", ".join(parts)


def load() -> str:
    """How busy the machine is, which matters little for ratios and much for seconds."""
    return f"load {os.getloadavg()[0]:.1f}"
