"""What Linux tells about processes, and how a rank ends with the process that started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import time

SPAWNED = "CKPTTOOL_SPAWNED"  # the environment variable that names the process that started a rank by --spawn
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def machine() -> str:
    """Return what processes with comparable ids share: the boot of a machine, and the namespace of ids."""
    with contextlib.suppress(OSError):
        if boot := _text("/proc/sys/kernel/random/boot_id").strip():
            return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def began(pid: int) -> int:
    """Return when a process began, in ticks since the boot; 0 if it does not exist. Ids are used again."""
    fields = _fields(pid)
    return int(fields[19]) if fields else 0


def state(pid: int, began_at: int) -> str:
    """Return the letter of a process's state (proc(5)): R, S, D, T for stopped; "" if it has ended."""
    fields = _fields(pid)
    return "" if not fields or int(fields[19]) != began_at or fields[0] in "ZXx" else fields[0]


def work() -> tuple[float, int]:
    """Return the seconds that this process computed or waited for a processor, and the bytes it moved."""
    # On a busy machine a rank may get next to no time: it does not hang, and what it waits is counted, too.
    moved = re.findall(r"^[rw]char: (\d+)", _text("/proc/self/io"), re.MULTILINE)
    # The second number: for how long the main thread could have run and had no processor.
    waited = sum(map(int, _text("/proc/self/schedstat").split()[1:2])) / 1e9
    return time.process_time() + waited, sum(map(int, moved))


def children_seconds() -> float:
    """Return the seconds of processor time that living processes below this one have used."""
    total, left = 0.0, [os.getpid()]
    while left:
        pid = left.pop()
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                left += map(int, _text(f"/proc/{pid}/task/{thread}/children").split())
        fields = _fields(pid) if pid != os.getpid() else []
        total += sum(map(int, fields[11:13])) / TICKS
    return total


def memory_kills() -> int:
    """Return how many processes the kernel has killed since the boot as memory ran out."""
    return sum(map(int, re.findall(r"^oom_kill (\d+)", _text("/proc/vmstat"), re.MULTILINE)))


def started_by_spawn() -> bool:
    """Return whether `--spawn` of train/main.py has started this rank."""
    return SPAWNED in os.environ


def end_with_parent(number: int) -> bool:
    """Let the kernel send this process a signal when its parent ends; return whether it will. Linux only."""
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number) == 0  # type: ignore[no-any-return]


def end_with_torchrun() -> None:
    """Let the kernel end this rank if torchrun exits without ending it, as after `kill -9`.

    Without this the rank would go on training or waiting unseen, and keep its GPU. Not for other launchers,
    whose process may legitimately exit before the ranks.
    """
    if (
        "TORCHELASTIC_RUN_ID" in os.environ
        and end_with_parent(signal.SIGTERM)
        # Of a launcher that has ended before, the kernel does not tell.
        and os.environ.get(SPAWNED, str(os.getppid())) != str(os.getppid())
    ):
        os.kill(os.getpid(), signal.SIGTERM)


def usable_cores() -> int:
    """Return how many cores this process may use: by its affinity, and by the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, quota() or cores)))


def quota(of_process: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> float | None:
    """Return how many cores' time the control groups of this process give it; None for no limit."""
    limits = []
    for line in _text(of_process).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = os.path.normpath(f"{root}/{controllers}/{path}")
        # A group can't have more than the groups around it. In a container the path may lie outside.
        while folder.startswith(root):
            limits += _limit(folder)
            folder = os.path.dirname(folder)
        limits += _limit(os.path.join(root, controllers))
    return min(limits, default=None)


def _limit(folder: str) -> list[float]:
    """Return the cores' time of a control group of version 2 or 1, if it is limited."""
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(ValueError, ZeroDivisionError):
            words = [word for name in files for word in _text(os.path.join(folder, name)).split()]
            allowed, period = map(int, words)  # "max" and -1: no limit
            return [allowed / period] if allowed > 0 else []
    return []


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it can't be read."""
    entries = _text(f"/proc/{pid}/environ").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; none if there is no such process."""
    # Any other error is one: a process that can't be looked at has not ended.
    return _text(f"/proc/{pid}/stat", (FileNotFoundError, ProcessLookupError)).rpartition(")")[2].split()


def _text(path: str, absent: tuple[type[OSError], ...] = (OSError,)) -> str:
    """Return what a file of the system says; "" where there is none, or none for this user."""
    with contextlib.suppress(*absent), open(path, errors="surrogateescape") as file:
        return file.read()
    return ""
