"""`--profile`: some steps of rank 0 recorded by torch's profiler, and a table of where their time goes.

Imports torch. It writes profile/trace.json.gz, for ui.perfetto.dev, and profile/operators.txt.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from ckpttool.errors import FileError
from ckpttool.files.failures import naming
from train import console
from train.log.step_log import StepLog

# Steps before those that `--profile N` records: the first ones are not like the others.
WARM_UP = 10
ROWS = 40  # operators in the table that is written


class Profile:
    """Records the steps that `span` names, `N` or `N-M`; of a training that begins after the step `start`."""

    def __init__(self, span: str, folder: str, log: StepLog, start: int = 0) -> None:
        self.folder, self.log = os.path.join(folder, "profile"), log
        first, dash, last = span.partition("-")
        begin = int(first) if dash else start + WARM_UP + 1
        self.steps = range(begin, int(last) + 1 if dash else begin + int(first))
        self.done = 0
        self._profiler: Any = None
        self._before: dict[str, float] = {}

    def begin_step(self, number: int) -> None:
        """Record the step that comes next, if it is one of them."""
        if self._profiler is not None or self.done or number not in self.steps:
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # what it would say on stderr is for its authors
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] * (self.log.device.type == "cuda")
        self._profiler = torch.profiler.profile(activities=activities)
        self._before, self._first = self.log.total(), number
        self.log.is_profiled = True
        self._profiler.start()

    def end_step(self, number: int, *, last: bool = False) -> list[str]:
        """Write what was recorded after the last of the steps, or of the run; return its table."""
        if self._profiler is None or (number < self.steps[-1] and not last):
            return []
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self.log.is_profiled, self.done = False, number - self._first + 1
        after = self.log.total()
        seconds = {name: after[name] - before for name, before in self._before.items()}
        trace, table = (os.path.join(self.folder, name) for name in ("trace.json.gz", "operators.txt"))
        try:
            with naming(self.folder):
                os.makedirs(self.folder, exist_ok=True)
                profiler.export_chrome_trace(trace)
                by = "self_cuda_time_total" if self.log.device.type == "cuda" else "self_cpu_time_total"
                with open(table, "w", encoding="utf-8") as file:
                    file.write(profiler.key_averages().table(sort_by=by, row_limit=ROWS) + "\n")
        except (FileError, RuntimeError) as error:  # kineto raises the latter
            console.warn(f"--profile: {error}; training goes on")
            return []
        return [*self._lines(seconds), f"{trace} (ui.perfetto.dev), {table}"]

    def _lines(self, seconds: dict[str, float]) -> list[str]:
        whole, ms = seconds.pop("step"), 1e3 / self.done
        rest = {**seconds, "rest": max(whole - sum(seconds.values()), 0.0)}
        last = self._first + self.done - 1
        lines = [f"steps {self._first} to {last} of rank 0, {whole * ms:.1f} ms each"]
        return lines + [f"{name:<8} {s * ms:8.1f} ms {s / (whole or 1):6.1%}" for name, s in rest.items()]

    def leave(self) -> None:
        """Stop recording in a run that has failed."""
        if self._profiler is not None:
            with contextlib.suppress(RuntimeError):
                self._profiler.stop()
            self._profiler = None
