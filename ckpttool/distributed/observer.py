"""What a rank is doing: told by the thread that trains, observed by another one. Needs no torch."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TypeVar

from . import hangs, processes
from .hangs import Beat

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
        # Called in the thread that trains, which `threading.get_ident` names.
        self.watched, self.interval, self.over = watched, interval, over
        self.clock, self.beat = RunningClock(3 * interval + 1), Beat()
        # Receives the stacks of a process whose interpreter is held; None where the system has no such files.
        self.dump = os.memfd_create("stack") if hasattr(os, "memfd_create") else None
        self._thread = threading.get_ident()

    def begin(self) -> None:
        """Count what happens from now on."""
        self._marked = self._worked = self.clock.now()
        self._marks, self._work, self._children = self.watched.marks, processes.work(), -1.0
        # If something holds the interpreter, no Python thread can say where it is; faulthandler can. It is
        # asked to: a timer that ran out while the process was stopped made it read the stacks of threads that
        # ran on, and it crashed.
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
        work, children = processes.work(), processes.children_seconds() if age > 3 * self.interval else -1.0
        seconds, moved = work[0] - self._work[0], work[1] - self._work[1]
        if children >= 0 <= self._children:
            seconds += children - self._children
        self._work, self._children = work, children
        return seconds > BUSY * self.interval or moved > BUSY_BYTES * self.interval


class RunningClock:
    """Seconds in which this process ran, so that no rank is blamed for time when it was stopped."""

    # Of a gap between two calls only `most` seconds count: its machine, or all ranks, slept through the rest.

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


def is_debugged(frame: FrameType) -> bool:
    """Return whether the thread is in a debugger."""
    return any(outer.f_globals.get("__name__") in DEBUGGERS for outer in _outwards(frame))


def shown_stack(frame: FrameType) -> str:
    """Return the innermost calls, without those that DDP and modules put between a model and its layers."""
    inner = ("torch.nn.modules.module", "torch.nn.parallel.distributed")
    frames = [
        outer for outer in _outwards(frame) if outer is frame or outer.f_globals.get("__name__") not in inner
    ]
    lines = [line for outer in reversed(frames[:8]) for line in traceback.format_stack(outer, limit=1)]
    return "".join(lines)[-4000:]


def is_in_collective(frame: FrameType) -> bool:
    """Return whether a thread is in a collective: in torch.distributed, in DDP, or in a backward pass."""
    # A backward pass that runs no Python only computes, or waits for the reduction.
    name = str(frame.f_globals.get("__name__"))
    return name.startswith(("torch.distributed.", "torch.nn.parallel.distributed", "torch.autograd.graph"))
