"""A tracker whose client runs in a process of its own, so that nothing of it can hold up or change training.

A client waits for its server, starts threads and draws random numbers. Here a step writes a line into a pipe,
which never waits: train/log/tracker_client.py reads it at once, and holds what its server does not take.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from train import console
from train.config.training import TrainConfig

CLIENT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tracker_client.py")
# Seconds that the end of a run waits at most for what is not sent; a third of --grace if it is told to end.
PATIENCE = 60.0
# Lines that are held for a process that does not read.
MOST = 10_000


class TrackerProcess(contextlib.AbstractContextManager[Any]):
    """A sink for the entries of the log, by name: wandb, mlflow or trackio. On rank 0 only."""

    def __init__(
        self, name: str, config: TrainConfig, folder: str, is_told: Callable[[], object] = lambda: False
    ) -> None:
        self.name, self.grace, self.is_told = name, config.grace, is_told
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        # In a session of its own, it does not end with Ctrl-C, but when the run says so or is gone.
        self._process = subprocess.Popen(
            [sys.executable, CLIENT], stderr=subprocess.DEVNULL, start_new_session=True, bufsize=0, **pipes
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        for descriptor in (self._to, self._from):
            os.set_blocking(descriptor, False)
        self._waiting: deque[bytes] = deque()
        self._left_out, self._heard, self._is_gone = 0, b"", False
        self._send(tracker=name, folder=os.path.abspath(folder), settings=config.plain())

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Hand over numbers about a step; they are sent when they can be."""
        self._send(values=dict(values), step=step, time=time.time())

    def _send(self, **line: Any) -> None:
        self._waiting.append(f"{json.dumps(line)}\n".encode())
        while len(self._waiting) > MOST:
            del self._waiting[1]  # of the first, a part may be sent
            self._left_out += 1
        self._write()
        self._hear()

    def _write(self) -> None:
        try:
            while self._waiting and not self._is_gone:
                done = os.write(self._to, self._waiting[0])
                if done == len(self._waiting[0]):
                    self._waiting.popleft()
                else:
                    self._waiting[0] = self._waiting[0][done:]
        except BlockingIOError:
            pass  # the process is busy, and reads later
        except BrokenPipeError:
            self._is_gone = True
            self._say("its process has ended; log.jsonl has what it did not get")

    def _hear(self) -> None:
        """Report what the process has to say."""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._from, 1 << 12):
                self._heard += part
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            self._say(line.decode(errors="replace"))

    def _say(self, text: str) -> None:
        console.warn(f"--tracker {self.name}: {text}")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._send(end=0 if kind is None else 1)
        patience = min(PATIENCE, self.grace / 3) if kind is not None or self.is_told() else PATIENCE
        until = time.monotonic() + patience
        while self._process.poll() is None and (left := until - time.monotonic()) > 0:
            to = [self._to] if self._waiting and not self._is_gone else []
            select.select([], to, [], min(left, 0.02))
            self._write()
        self._hear()
        if self._process.returncode is None:
            self._say(f"not all was taken within {patience:.0f} s; log.jsonl has it")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._left_out:
            self._say(f"{self._left_out} entries were left out; log.jsonl has them")
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
