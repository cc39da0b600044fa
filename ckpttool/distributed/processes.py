"""What Linux tells about a process: its state, and how much it works. Other systems tell nothing."""

from __future__ import annotations

import contextlib
import os
import re
import time

TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def machine() -> str:
    """Return what processes with comparable ids share: the boot of a machine, and the namespace of ids."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def began(pid: int) -> int:
    """Return when a process began, in ticks since the boot; 0 if it does not exist. Ids are used again."""
    fields = _fields(pid)
    return int(fields[19]) if fields else 0


def state(pid: int, began_at: int) -> str:
    """Return the letter of a process's state (proc(5)): R, S, D, T for stopped; "" if it has ended."""
    fields = _fields(pid)
    if not fields or int(fields[19]) != began_at or fields[0] in "ZXx":
        return ""
    return fields[0]


def work() -> tuple[float, int]:
    """Return the seconds of processor time that this process has used, and the bytes it read and wrote."""
    moved = 0
    with contextlib.suppress(OSError), open("/proc/self/io") as file:
        moved = sum(int(count) for count in re.findall(r"^[rw]char: (\d+)", file.read(), re.MULTILINE))
    return time.process_time(), moved


def children_seconds() -> float:
    """Return the seconds of processor time that living processes below this one have used."""
    total, left = 0.0, [os.getpid()]
    while left:
        pid = left.pop()
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    left += map(int, file.read().split())
        fields = _fields(pid) if pid != os.getpid() else []
        total += sum(map(int, fields[11:13])) / TICKS
    return total


def memory_kills() -> int:
    """Return how many processes the kernel has killed since the boot as memory ran out."""
    with contextlib.suppress(OSError), open("/proc/vmstat") as file:
        if found := re.search(r"^oom_kill (\d+)", file.read(), re.MULTILINE):
            return int(found[1])
    return 0


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; none if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
