"""Trackers of experiments: what log.jsonl gets, they get too, each an optional package.

Each is a `Sink` of train/log/step_log.py. TensorBoard's files are written here. The clients of W&B, MLflow
and trackio may wait for a server: each runs in a thread of rank 0, which takes entries from a queue. No step
waits for it, and the end of a run waits no longer than its limit. The thread shares the process: a client
that calls `os._exit` ends the run, and one that holds the interpreter's lock in C stops it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from io import BytesIO
from typing import Any

from ckpttool.core.files.commit import append_record, naming
from ckpttool.errors import UsageFault, install
from train import console
from train.config.sections import TrainConfig
from train.log import step_log
from train.log.step_log import HeldLines, Sink

# Of charts, beside those that have the name of a test set.
GROUPS = ("train", "epoch", "test", "time")
ABOUT_POSITION = {"step", "steps", "epoch", "epochs"}
# With `train_...`, the fields of an entry about an epoch that are not about the test set.
ABOUT_TRAINING = {"lr", "threads", "batch_size"}

# Seconds that the end of a run waits at most for what is not sent; a third of --grace if it is told to end.
PATIENCE = 60.0
# Seconds after which a client that has failed is tried again, at first and at most.
PAUSE, LONGEST = 1.0, 60.0
# Entries that are held for a server that is away; more are left out.
MOST = 100_000


def check(config: TrainConfig) -> None:
    """Refuse a tracker whose package is missing, or that is named twice, before anything starts."""
    for name in config.log.tracker:
        # Without an origin it is a mere folder, as W&B makes one.
        if getattr(importlib.util.find_spec(name), "origin", None) is None:
            hint = install(name)
            raise UsageFault(f"--tracker {name}: the package {name} is not installed", hint=hint)
        if config.log.tracker.count(name) > 1:
            raise UsageFault(f"--tracker {name}: is given twice", hint="give it once")
    for given in config.data.also_test if config.log.tracker else ():
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
        for name in config.log.tracker:
            if name == "tensorboard":
                sinks.append(stack.enter_context(TensorBoard(folder, step)))
            else:
                sinks.append(stack.enter_context(TrackerThread(name, config, folder, is_told)))
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


def tagged(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of an entry, under the names with which trackers make groups of charts.

    `train/loss` is that of the steps since the last entry, `epoch/train_loss` of an epoch, `test/…` of the
    test set, `NAME/…` of another one, and `time/…` are seconds.
    """
    group = "epoch" if "epoch" in entry else "test" if "test_loss" in entry else "train"
    found = {_tag(name, group): value for name, value in _numbers(entry) if name not in ABOUT_POSITION}
    # A metric's name is the user's, and means nothing here.
    own = {"metrics": entry.get("metrics", entry.get("test_metrics", {}))}
    for test_set, score in {"test": own, **entry.get("tests", {})}.items():
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


# ---- clients -------------------------------------------------------------------------------------------


class WeightsAndBiases:
    """A run of W&B in the folder `wandb` of a run; offline, unless WANDB_MODE says otherwise.

    W&B takes no values for steps that lie behind. So each start is a W&B run of its own; runs that continue
    one another are one group, named after the folder.
    """

    def __init__(self, folder: str, settings: Mapping[str, Any]) -> None:
        import wandb

        mode = None if "WANDB_MODE" in os.environ else "offline"
        names = {"project": os.environ.get("WANDB_PROJECT", "ckpttool"), "group": os.path.basename(folder)}
        quiet = wandb.Settings(silent=True, console="off")
        self.wandb = wandb
        self.run = wandb.init(**names, dir=folder, config=dict(settings), mode=mode, settings=quiet)

    def log(self, values: Mapping[str, float], step: int, at: float) -> None:
        self.run.log(dict(values), step=step)

    def finish(self, code: int) -> None:
        self.run.finish(exit_code=code)
        self.wandb.teardown()  # waits for the process that writes the file, which `finish` does not


class MLflow:
    """A run of MLflow, in mlflow.db in a run's folder unless MLFLOW_TRACKING_URI says otherwise."""

    def __init__(self, folder: str, settings: Mapping[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # what fails is tried again here
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        at = os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{os.path.join(folder, 'mlflow.db')}")
        self.client, self.metric = MlflowClient(at, at), Metric
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "ckpttool")
        experiment = self.client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self.client.create_experiment(name)
        self.run = self.client.create_run(number, run_name=os.path.basename(folder)).info.run_id
        self.settings = [Param(key, str(value)[:500]) for key, value in settings.items()]

    def log(self, values: Mapping[str, float], step: int, at: float) -> None:
        # It refuses a whole batch for one character, as in acc@1.
        known = ((re.sub(r"[^\w/. :-]", "_", name), float(value)) for name, value in values.items())
        metrics = [self.metric(name, value, int(at * 1e3), step) for name, value in known]
        self.client.log_batch(self.run, metrics=metrics, params=self.settings)
        self.settings = []  # not before: a server that was away gets them later

    def finish(self, code: int) -> None:
        self.client.set_terminated(self.run, "FAILED" if code else "FINISHED")


class Trackio:
    """A run of trackio, in TRACKIO_PROJECT or ckpttool; TRACKIO_SPACE_ID shares it."""

    def __init__(self, folder: str, settings: Mapping[str, Any]) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", "ckpttool")
        space = os.environ.get("TRACKIO_SPACE_ID")
        self.trackio = trackio
        trackio.init(project=project, name=os.path.basename(folder), space_id=space, config=dict(settings))

    def log(self, values: Mapping[str, float], step: int, at: float) -> None:
        self.trackio.log(dict(values), step=step)

    def finish(self, code: int) -> None:
        self.trackio.finish()


CLIENTS: dict[str, Any] = {"wandb": WeightsAndBiases, "mlflow": MLflow, "trackio": Trackio}


class TrackerThread(contextlib.AbstractContextManager[Any]):
    """A sink for the entries of the log: a client, by name, in a thread of its own. On rank 0 only."""

    def __init__(
        self, name: str, config: TrainConfig, folder: str, is_told: Callable[[], object] = lambda: False
    ) -> None:
        self.name, self.grace, self.is_told = name, config.saving.grace, is_told
        self._settings, self._folder = config.plain(), os.path.abspath(folder)
        self._entries: queue.Queue[tuple[Mapping[str, float], int, float] | None] = queue.Queue()
        self._client: Any = None
        self._left_out, self._code = 0, 0
        self._ended, self._is_over = threading.Event(), False
        # Python waits for no daemon when it ends: a client that hangs can't hold the run.
        self._thread = threading.Thread(target=self._serve, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def write(self, entry: Mapping[str, Any], step: int) -> None:
        """Hand over the numbers of an entry; they are sent when they can be."""
        values = tagged(entry)
        if values and self._entries.qsize() < MOST:
            self._entries.put((values, step, time.time()))
        elif values:
            self._left_out += 1

    def _serve(self) -> None:
        """Open the client and give it all entries, in order, until None; give up where the run is over."""
        if not self._repeat(self._open):
            return
        while entry := self._entries.get():
            if not self._repeat(partial(self._client.log, *entry)):
                return
        try:
            self._client.finish(self._code)
        except (Exception, SystemExit) as error:
            self._say(f"{type(error).__name__}: {error}")

    def _open(self) -> None:
        self._client = CLIENTS[self.name](self._folder, self._settings)

    def _repeat(self, call: Callable[[], object]) -> bool:
        """Call the client, again where it fails, less and less often; return False once the run is over."""
        pause = 0.0
        while not self._is_over:
            if self._succeeds(call, quiet=pause > 0):
                if pause:
                    self._say("answers again")
                return True
            pause = min(max(2 * pause, PAUSE), LONGEST)
            if self._ended.wait(pause):
                time.sleep(PAUSE)
        return False

    def _succeeds(self, call: Callable[[], object], *, quiet: bool) -> bool:
        try:
            call()
        except (Exception, SystemExit) as error:
            if not quiet:
                first = " ".join(str(error).split())[:200]
                self._say(f"{type(error).__name__}: {first}; training goes on, and it is tried again")
            return False
        return True

    def _say(self, text: str) -> None:
        console.warn(f"--tracker {self.name}: {text}")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._code = 0 if kind is None else 1
        self._entries.put(None)
        self._ended.set()
        patience = min(PATIENCE, self.grace / 3) if kind is not None or self.is_told() else PATIENCE
        self._thread.join(patience)
        self._is_over = True
        if self._thread.is_alive():
            self._say(f"not all was taken within {patience:.0f} s; log.jsonl has it")
        if self._left_out:
            self._say(f"{self._left_out} entries were left out; log.jsonl has them")
