"""The process in which a tracker's client runs: it may wait for its server, fail, hang, draw random numbers.

    python tracker_client.py < lines of JSON      # started by train/log/trackers.py

The first line says which tracker, the run's folder and its settings; each other one has `values`, `step`
and `time`, and the last one `end`, the exit code. What the client refuses is held and tried again. Lines on
stdout are for the run's report. It imports nothing of this package, so that it starts at once.
"""

from __future__ import annotations

import json
import os
import queue
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

# Seconds after which a client that has failed is tried again, at first and at most.
PAUSE, LONGEST = 1.0, 60.0
# Seconds to the end of the process, from the end of the run on.
PATIENCE = 55.0
# Lines that are held for a server that is away; of more, the oldest are left out.
MOST = 100_000
# What is added to the niceness: training goes first where cores are few.
NICENESS = 10


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


TRACKERS: dict[str, Any] = {"wandb": WeightsAndBiases, "mlflow": MLflow, "trackio": Trackio}


class Client:
    """A tracker, opened when it can be, and the lines that it has not taken yet."""

    def __init__(self, name: str, folder: str, settings: Mapping[str, Any], say: Any) -> None:
        self.make = lambda: TRACKERS[name](folder, settings)
        self.say, self.tracker = say, None  # type: Any, Any
        self.waiting: deque[Mapping[str, Any]] = deque(maxlen=MOST)
        self.pause, self.again = 0.0, 0.0

    def send(self) -> None:
        """Hand over what is waiting, if it is time for that; what fails is tried later."""
        if time.monotonic() < self.again:
            return
        try:
            self.tracker = self.tracker or self.make()
            while self.waiting:
                line = self.waiting[0]
                self.tracker.log(line["values"], line["step"], line["time"])
                self.waiting.popleft()
        except (Exception, SystemExit) as error:
            if not self.pause:
                first = " ".join(str(error).split())[:200]
                self.say(f"{type(error).__name__}: {first}; training goes on, and it is tried again")
            self.pause = min(max(2 * self.pause, PAUSE), LONGEST)
            self.again = time.monotonic() + self.pause
        else:
            if self.pause:
                self.say("answers again")
            self.pause = 0.0

    def end(self, code: int) -> None:
        """Try until everything is taken, or the time is over."""
        until = time.monotonic() + PATIENCE
        while self.waiting and time.monotonic() < until:
            self.send()
            time.sleep(0.05)
        if self.tracker is not None:
            try:
                self.tracker.finish(code)
            except (Exception, SystemExit) as error:
                self.say(f"{type(error).__name__}: {error}")
        if self.waiting:
            self.say(f"{len(self.waiting)} entries were not taken; log.jsonl has them")


def main() -> None:
    sys.path.pop(0)  # this folder: a file in it may bear the name of a module
    os.nice(NICENESS)
    report = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)  # what the client prints is for people who look at it alone
    lines: queue.Queue[dict[str, Any]] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(json.loads(line))
        lines.put({"end": 1})  # the run is gone, and has said nothing

    first = json.loads(sys.stdin.readline())
    threading.Thread(target=listen, daemon=True).start()

    def say(text: str) -> None:
        try:
            report.write(" ".join(text.split()) + "\n")
        except OSError:  # the run is gone
            report.close()

    client = Client(first["tracker"], first["folder"], first["settings"], say)
    while True:
        client.send()
        try:
            line = lines.get(timeout=PAUSE)
        except queue.Empty:
            continue
        if "end" in line:
            break
        client.waiting.append(line)
    client.end(line["end"])
    os._exit(0)  # whatever thread the client has left


if __name__ == "__main__":
    main()
