"""What a rank is doing, told by the thread that trains and observed by another, and what Linux says of it."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TypeVar

from . import hangs
from .hangs import Beat

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


def work_done() -> tuple[float, int]:
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
    ends = "TORCHELASTIC_RUN_ID" in os.environ and end_with_parent(signal.SIGTERM)
    # The kernel does not tell of a launcher that ended before.
    if ends and os.environ.get(SPAWNED, str(os.getppid())) != str(os.getppid()):
        os.kill(os.getpid(), signal.SIGTERM)


def report_to_torchrun(text: str) -> None:
    """Let torchrun, if it started this rank, end its own report with a text, as its `record` would."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None or os.path.exists(path):  # the first failure counts
        return
    # Ranks that end with this one, in the same second, would else be taken for the cause.
    about = {"py_callstack": text, "timestamp": str(int(time.time()) - 1)}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": text, "extraInfo": about}}, file)


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
    """Return the fields of /proc/PID/stat from the state on; empty if there is no such process."""
    # Other errors are raised: a process that can't be looked at has not ended.
    return _text(f"/proc/{pid}/stat", (FileNotFoundError, ProcessLookupError)).rpartition(")")[2].split()


def _text(path: str, absent: tuple[type[OSError], ...] = (OSError,)) -> str:
    """Return the text of a system file; "" where it does not exist or this user can't read it."""
    with contextlib.suppress(*absent), open(path, errors="surrogateescape") as file:
        return file.read()
    return ""


# ---- What a rank is doing


T = TypeVar("T")

# At this signal a process writes its stacks. Real-time signals have no meaning of their own.
ASKED = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else None

# From this much processor time per second a rank counts as computing.
BUSY = 0.05

# From this many bytes per second it counts as reading or writing.
BUSY_BYTES = 200_000


class Watch:
    """What this rank does now.

    Attributes:
        timeout: seconds after which a rank that does nothing counts as hung.
        step: that it takes or has just taken; 0 before the first.
        doing: the phase.
        counts: how often each phase was entered.
        marks: a number that changes with each sign of progress.
        excuse: called when the job ends because another rank was told to end.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.step = self.marks = 0
        self.doing = "start"
        self.counts: dict[str, int] = {}
        self.excuse: Callable[[], object] = lambda: None

    def phase(self, name: str) -> None:
        """Note that this rank now does `name`, until it is told of another phase."""
        self.doing = name
        self.counts[name] = self.counts.get(name, 0) + 1
        self.marks += 1

    def steps(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches. Each begins a step: with the phase `data` until it is there, then `step`."""
        iterator = iter(batches)
        while True:
            self.step += 1
            self.phase("data")
            try:
                batch = next(iterator)
            except StopIteration:
                self.step -= 1
                self.phase("step")
                return
            self.phase("step")
            yield batch


class Observer:
    """Looks at this process from time to time."""

    def __init__(self, watched: Watch, interval: float, over: threading.Event) -> None:
        # Called in the thread that trains: `threading.get_ident` is its number.
        self.watched, self.interval, self.over = watched, interval, over
        self.clock, self.beat = RunningClock(3 * interval + 1), Beat()
        # Receives the stacks of a process whose interpreter is held; None where the system has no such files.
        self.dump = os.memfd_create("stack") if hasattr(os, "memfd_create") else None
        self._thread = threading.get_ident()

    def begin(self) -> None:
        """Count what happens from now on."""
        self._marked = self._worked = self.clock.now()
        self._marks, self._work, self._children = self.watched.marks, work_done(), -1.0
        # While something holds the interpreter, no Python thread can say where it is; faulthandler can. It
        # waits for a signal. With a timer instead, it read the stacks of running threads after the process
        # had been stopped, and crashed.
        if self.dump is not None and ASKED is not None:
            faulthandler.register(ASKED, self.dump)

    def close(self) -> None:
        """Close the file of the stack. No look may be under way: another file may get its number."""
        if self.dump is not None:
            if ASKED is not None:
                faulthandler.unregister(ASKED)
            os.close(self.dump)

    def look(self) -> None:
        now, marks = self.clock.now(), self.watched.marks
        if marks != self._marks:
            self._marks, self._marked = marks, now
        frame = sys._current_frames().get(self._thread) if now - self._marked > 2 * self.interval else None
        if frame is not None and is_debugged(frame):
            self._marked = now  # a person looks at it
        age = now - self._marked
        if self._works(age) and age < hangs.WORKING_FACTOR * self.watched.timeout:
            self._worked = now
        self.beat = Beat(
            number=self.beat.number + 1,
            step=self.watched.step,
            phase=self.watched.doing,
            age=age,
            idle=now - max(self._marked, self._worked),
            waits=frame is not None and is_in_collective(frame),
            counts=dict(self.watched.counts),
            stack=shown_stack(frame) if frame is not None else "",
        )
        if self.dump is not None and not self.over.is_set():  # of a time when the interpreter was held
            os.ftruncate(self.dump, 0)
            os.lseek(self.dump, 0, os.SEEK_SET)

    def _works(self, age: float) -> bool:
        """Return whether this process or its children computed, read or wrote since the last look."""
        work, children = work_done(), children_seconds() if age > 3 * self.interval else -1.0
        seconds, moved = work[0] - self._work[0], work[1] - self._work[1]
        if children >= 0 <= self._children:
            seconds += children - self._children
        self._work, self._children = work, children
        return seconds > BUSY * self.interval or moved > BUSY_BYTES * self.interval


class RunningClock:
    """Seconds in which this process ran, so that no rank is blamed for time when it was stopped."""

    # A gap between two calls counts as `most` seconds at most: the machine, or all ranks, slept longer.

    def __init__(self, most: float) -> None:
        self.most, self.last, self.total = most, time.monotonic(), 0.0
        self.lock = threading.Lock()

    def now(self) -> float:
        with self.lock:
            now = time.monotonic()
            self.total += min(now - self.last, self.most)
            self.last = now
            return self.total


DEBUGGERS = {"pdb", "bdb", "ipdb", "pudb"}


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def is_debugged(frame: FrameType) -> bool:
    """Return whether the thread is in a debugger."""
    return any(_module_of(outer) in DEBUGGERS for outer in _outwards(frame))


def shown_stack(frame: FrameType) -> str:
    """Return the innermost calls, without those that DDP and modules put between a model and its layers."""
    inner = ("torch.nn.modules.module", "torch.nn.parallel.distributed")
    frames = [each for each in _outwards(frame) if each is frame or _module_of(each) not in inner]
    lines = [line for outer in reversed(frames[:8]) for line in traceback.format_stack(outer, limit=1)]
    return "".join(lines)[-4000:]


def is_in_collective(frame: FrameType) -> bool:
    """Return whether a thread is in a collective: in torch.distributed, in DDP, or in a backward pass."""
    # A backward pass without Python only computes, or waits for the reduction.
    waiting = ("torch.distributed.", "torch.nn.parallel.distributed", "torch.autograd.graph")
    return _module_of(frame).startswith(waiting)
