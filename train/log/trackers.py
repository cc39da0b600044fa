"""Trackers of experiments: what log.jsonl gets, they get too, each an optional package.

Each is a `Sink` of train/log/step_log.py. TensorBoard's files are written here; the clients of W&B, MLflow
and trackio, which may have to wait for a server, run in a process of their own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

from ckpttool.errors import UsageFault, install
from ckpttool.files.commit import append_record
from ckpttool.files.failures import naming
from train.config.training import TrainConfig
from train.log import log_file
from train.log.log_file import HeldLines
from train.log.tracker_process import TrackerProcess

if TYPE_CHECKING:
    from train.log.step_log import Sink

ABOUT_POSITION = {"step", "steps", "epoch", "epochs"}
# With `train_...`, the fields of an entry about an epoch that are not about the test set.
ABOUT_TRAINING = {"lr", "threads", "batch_size"}


def check(config: TrainConfig) -> None:
    """Refuse a tracker whose package is missing, or that is named twice, before anything starts."""
    for name in config.tracker:
        # Without an origin it is a mere folder, as W&B makes one.
        if getattr(importlib.util.find_spec(name), "origin", None) is None:
            hint = install(name)
            raise UsageFault(f"--tracker {name}: the package {name} is not installed", hint=hint)
        if config.tracker.count(name) > 1:
            raise UsageFault(f"--tracker {name}: is given twice", hint="give it once")


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
        super().__init__(partial(log_file.append, folder))

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

    `train/loss` is that of the steps since the last entry, `epoch/train_loss` of a whole epoch, `test/…` of
    the test set, `NAME/…` of another one, and `time/…` are seconds.
    """
    group = "epoch" if "epoch" in entry else "test" if "test_loss" in entry else "train"
    flat = {**entry, **entry.get("metrics", {}), **entry.get("test_metrics", {})}
    found = {_tag(name, group): value for name, value in _numbers(flat)}
    for test_set, score in entry.get("tests", {}).items():
        of_score = {**score, **score.get("metrics", {})}
        found |= {f"{test_set}/{name}": value for name, value in _numbers(of_score)}
    return found


def _numbers(entry: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in entry.items():
        if name not in ABOUT_POSITION and isinstance(value, int | float) and math.isfinite(value):
            yield name, value


def _tag(name: str, group: str) -> str:
    if name == "seconds" or name.endswith("_seconds"):
        return f"time/{'epoch' if (name, group) == ('seconds', 'epoch') else name.removesuffix('_seconds')}"
    if group == "epoch" and not name.startswith("train_") and name not in ABOUT_TRAINING:
        return f"test/{name}"
    return f"{group}/{name.removeprefix('test_')}"
