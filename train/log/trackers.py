"""Trackers of experiments: what log.jsonl gets, they get too, each an optional package.

Each is a `Sink` of train/log/step_log.py. TensorBoard's files are written here. The clients of W&B, MLflow
and trackio wait for a server, start threads and draw random numbers: each runs in a process of its own, so
that nothing of it can hold up or change training. A step writes a line into a pipe, which never waits;
train/log/tracker_client.py reads it at once, and holds what its server does not take.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

from ckpttool.errors import UsageFault, install
from ckpttool.files.commit import append_record
from ckpttool.files.failures import naming
from train import console
from train.config.sections import TrainConfig
from train.log import step_log
from train.log.step_log import HeldLines

if TYPE_CHECKING:
    from train.log.step_log import Sink

# Of charts, beside those that have the name of a test set.
GROUPS = ("train", "epoch", "test", "time")
ABOUT_POSITION = {"step", "steps", "epoch", "epochs"}
# With `train_...`, the fields of an entry about an epoch that are not about the test set.
ABOUT_TRAINING = {"lr", "threads", "batch_size"}

CLIENT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tracker_client.py")
# Seconds that the end of a run waits at most for what is not sent; a third of --grace if it is told to end.
PATIENCE = 60.0
# Lines that are held for a process that does not read.
MOST = 10_000


def check(config: TrainConfig) -> None:
    """Refuse a tracker whose package is missing, or that is named twice, before anything starts."""
    for name in config.tracker:
        # Without an origin it is a mere folder, as W&B makes one.
        if getattr(importlib.util.find_spec(name), "origin", None) is None:
            hint = install(name)
            raise UsageFault(f"--tracker {name}: the package {name} is not installed", hint=hint)
        if config.tracker.count(name) > 1:
            raise UsageFault(f"--tracker {name}: is given twice", hint="give it once")
    for given in config.also_test if config.tracker else ():
        if given.partition("=")[0] in GROUPS:
            what = f"--also-test {given}: trackers have charts of that name, of something else"
            raise UsageFault(what, hint="name it otherwise")


@contextlib.contextmanager
def opened(
    config: TrainConfig, folder: str, step: int, is_told: Callable[[], object] = lambda: False
) -> Iterator[list[Sink]]:
    """Open the log and the trackers that the flags ask for; close them after the block. On rank 0 only.

    What a tracker knows of steps after `step`, the optimizer steps done since the beginning, is void.
    `is_told` says whether a signal ends the run, so that it waits for no server.
    """
    with contextlib.ExitStack() as stack:
        sinks: list[Sink] = [stack.enter_context(LogFile(folder))]
        for name in config.tracker:
            if name == "tensorboard":
                sinks.append(stack.enter_context(TensorBoard(folder, step)))
            else:
                sinks.append(Tagged(stack.enter_context(TrackerProcess(name, config, folder, is_told))))
        yield sinks


class LogFile(HeldLines[Mapping[str, Any]]):
    """log.jsonl in a run's folder. What a full disk refuses is written when there is room again."""

    def __init__(self, folder: str) -> None:
        super().__init__(partial(step_log.append_entry, folder))

    def write(self, entry: Mapping[str, Any], step: int) -> None:
        self.add(entry)


class TensorBoard(HeldLines[bytes]):
    """Events for `tensorboard --logdir runs`, in the folder `tensorboard` of a run.

    As in `LogFile`, what a full disk refuses is written later. TensorBoard's own writer would end with the
    thread in which it writes, so its records are made and appended here. It hides what an interrupted run
    wrote after `step`, where the run continues.
    """

    def __init__(self, folder: str, step: int) -> None:
        folder = os.path.join(folder, "tensorboard")
        place = f"{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"  # read in the order of names

        def append(record: bytes) -> None:
            with naming(folder):
                append_record(os.path.join(folder, f"events.out.tfevents.{place}"), record)

        super().__init__(append)
        with naming(folder):
            os.makedirs(folder, exist_ok=True)
        self._record(file_version="brain.Event:2")
        if step:
            self._record(step=step + 1, session_log={"status": "START"})

    def write(self, entry: Mapping[str, Any], step: int) -> None:
        values = [{"tag": tag, "simple_value": value} for tag, value in tagged(entry).items()]
        if values:
            self._record(step=step, summary={"value": values})

    def _record(self, **event: Any) -> None:
        # Optional, as what the others need.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **event).SerializeToString())
        self.add(record.getvalue())


class Tagged:
    """What hands the numbers of an entry to a tracker whose client runs in a process of its own."""

    def __init__(self, process: TrackerProcess) -> None:
        self.process = process

    def write(self, entry: Mapping[str, Any], step: int) -> None:
        if values := tagged(entry):
            self.process.write(values, step)


def tagged(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of an entry, under the names with which trackers make groups of charts.

    `train/loss` is that of the steps since the last entry, `epoch/train_loss` of an epoch, `test/…` of the
    test set, `NAME/…` of another one, and `time/…` are seconds.
    """
    group = "epoch" if "epoch" in entry else "test" if "test_loss" in entry else "train"
    found = {_tag(name, group): value for name, value in _numbers(entry) if name not in ABOUT_POSITION}
    # A metric's name is the user's, and means nothing here.
    tests = {
        "test": {"metrics": entry.get("metrics", entry.get("test_metrics", {}))},
        **entry.get("tests", {}),
    }
    for test_set, score in tests.items():
        of_score = {**score, **score.get("metrics", {})}
        found |= {f"{test_set}/{name}": value for name, value in _numbers(of_score)}
    return found


def _numbers(entry: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in entry.items():
        if isinstance(value, int | float) and math.isfinite(value):
            yield name, value


def _tag(name: str, group: str) -> str:
    if name == "seconds" or name.endswith("_seconds"):
        return f"time/{'epoch' if (name, group) == ('seconds', 'epoch') else name.removesuffix('_seconds')}"
    if group == "epoch" and not name.startswith("train_") and name not in ABOUT_TRAINING:
        return f"test/{name}"
    if group == "test" and name.startswith("train_"):  # of an epoch that the run does not end
        return f"epoch/{name}"
    return f"{group}/{name.removeprefix('test_')}"


# ---- the process of a client --------------------------------------------------------------------------


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
