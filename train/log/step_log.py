"""The log of a run: its file, the figures of its steps, their speed, and a profile. Imports torch.

A line with `epoch` ends an epoch and has the scores on the test set. A line with `step` is about the steps
since the line before (train/log/step_log.py); with `test_loss` it is a score in the middle of an epoch, and
with `event` what happened in that step: a save that failed or was waited for, or a signal.
docs/log.md lists the fields; `ckpttool.inspecting.run_log` reads them.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn
from torch.profiler import ProfilerActivity
from torch.utils.flop_counter import FlopCounterMode

from ckpttool.core.files.commit import append_line, naming, replacing
from ckpttool.core.words import finite
from ckpttool.distributed import collectives, heartbeat
from ckpttool.distributed.group import Place
from ckpttool.distributed.uneven import run_dummy_pass
from ckpttool.errors import FileError
from ckpttool.inspecting.run_log import LOG, parsed
from ckpttool.models import factory
from train import console
from train.config.sections import TrainConfig
from train.tasks.builtin import Task

Line = TypeVar("Line")


def append_entry(folder: str, entry: Mapping[str, Any]) -> None:
    """Add one object to the log, on a line of its own, or raise FileError and leave the log as it was."""
    path = os.path.join(folder, LOG)
    with naming(path):
        append_line(path, json.dumps(finite(entry)).encode())


def cut_log(folder: str, *, epoch: int, step: int) -> None:
    """Remove what a run that continues from here will log again, and lines that a crash has cut off.

    Lines are in the order of the training. So everything is removed from the first line on that is about a
    later epoch or step; a line that names neither stays where it is.
    """
    path = os.path.join(folder, LOG)
    if not os.path.exists(path):
        return
    remaining = []
    with naming(path):
        with open(path, "rb") as file:
            for line in file:
                entry = parsed(line)
                if entry is None:
                    continue
                if _number(entry, "epoch") > epoch or _number(entry, "step") > step:
                    break
                remaining.append(line.rstrip(b"\n") + b"\n")
        with replacing(path) as file:
            file.writelines(remaining)


def _number(entry: Mapping[str, Any], name: str) -> float:
    value = entry.get(name)
    return value if isinstance(value, int | float) else -math.inf


class HeldLines(contextlib.AbstractContextManager[Any], Generic[Line]):
    """Lines for a file on a disk that may be full: what it refuses is written before the next line.

    `append` adds one to the file whole, or raises FileError. At the end of a context, FileError is raised if
    lines are left that can't be written, and nothing has failed already.
    """

    def __init__(self, append: Callable[[Line], object]) -> None:
        self._append = append
        self._waiting: list[Line] = []

    def add(self, line: Line) -> None:
        """Add a line; if it can't be written, say so and go on."""
        self._waiting.append(line)
        try:
            self.flush()
        except FileError as error:
            if len(self._waiting) == 1:
                console.warn(f"{error.message}; training goes on, and tries again")

    def flush(self) -> None:
        """Write what is waiting. Raise FileError if the disk still refuses it."""
        while self._waiting:
            self._append(self._waiting[0])
            del self._waiting[0]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(*([FileError] if kind is not None else [])):
            self.flush()


# ---- speed -------------------------------------------------------------------------------------------


# Dense peaks of GPUs in FLOP/s, of bfloat16 and float16 with tensor cores and of float32 without, as NVIDIA's
# data sheets give them; the first name that a device's name contains.
PEAKS = {
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100 NVL": (835e12, 60e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "V100": (125e12, 15.7e12),
    "T4": (65e12, 8.1e12),
}


@dataclass(frozen=True)
class Work:
    """What is known of a training's work.

    Attributes:
        unit: what the loss is a mean over, in the plural; empty where that is not worth saying.
        flops: of the forward and backward passes of a sample; None where they are not known.
        peak: FLOP/s of the devices of all ranks; None where they are not known.
    """

    unit: str = ""
    flops: int | None = None
    peak: float | None = None

    def rates(self, samples: int, count: float, seconds: float) -> dict[str, float]:
        """Return what is done in a second, for the log."""
        found: dict[str, float] = {}
        if self.unit:
            found[f"{self.unit}_per_second"] = round(count / seconds, 3)
        if self.flops:
            found["flops_per_second"] = float(round(self.flops * samples / seconds))
            if self.peak:
                found["mfu"] = round(found["flops_per_second"] / self.peak, 4)
        return found


def work_of(config: TrainConfig, task: Task, place: Place, model: nn.Module, batch: Any) -> Work:
    """Return what is known of the work of a model that is not wrapped yet; `batch` is of one sample.

    With `--shard` its operations are not counted: a rank may have no room for gradients of the whole.
    """
    peak = peak_of(place.device, config.numbers.amp, place.world_size)
    if config.model.shard:
        return Work(task.unit, peak=peak)
    copied = factory.copy_of(model)  # one may count its passes
    forward = partial(task.forward, copied)
    flops = flops_of(lambda: run_dummy_pass(copied, batch, forward, together=False))
    return Work(task.unit, flops, peak)


def flops_of(one_pass: Callable[[], object]) -> int | None:
    """Return the floating point operations of a pass: torch counts matrix products and convolutions.

    None where it finds none, or can't count.
    """
    try:
        with FlopCounterMode(display=False) as counter:
            one_pass()
    except Exception:  # of a mode of torch's inside a user's model: without a count it trains as well
        return None
    return counter.get_total_flops() or None


def peak_of(device: torch.device, amp: str, ranks: int) -> float | None:
    """Return the FLOP/s of as many devices, in the precision of `--amp`; None if the device is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    low, single = next((peaks for known, peaks in PEAKS.items() if known in name), (None, None))
    peak = single if amp == "none" else low
    return None if peak is None else peak * ranks


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that were in use so far: of a GPU, by tensors; else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# ---- steps -------------------------------------------------------------------------------------------

#     log = StepLog(50, device, sinks)
#     with log.phase("backward", loss):
#         loss.backward()
#     log.add(loss, count)
#     log.step(number, samples=..., lr=..., epochs=...)
#
# A step reads the clock some ten times and adds the loss to a sum on the device. Nothing is read from the
# device, and nothing is sent, but once per interval.
#
# On a CPU, a phase is the time that this rank spent in it. On a GPU, where kernels run long after they were
# launched, it is the time between two events on its stream, which includes the time it stood idle there.
#
# DDP sums gradients over ranks while backward is still computing others, so the two can't be told apart in
# full. `backward` ends when this rank has computed its own gradients. `reduce` is its wait until they are
# summed: communication that computing does not hide, and the wait for slower ranks.


PHASES = ("data", "forward", "backward", "reduce", "update")


class Sink(Protocol):
    """Where the entries of the log go: a file, or a tracker of experiments. Only rank 0 has any."""

    def write(self, entry: Mapping[str, Any], step: int) -> None:
        """Write an entry, so that it is kept if the process is killed afterwards.

        Its `epoch` or `step` says what it is about; `step` here is of the optimizer, since the beginning.
        """


class StepLog:
    """Sums over an interval of steps, written as one entry at its end, on rank 0.

    Every rank has one. `step` is a collective where it writes an entry, and `write` always. An interval ends
    where the number of steps is divisible by `every`, and with the step `last`.
    """

    def __init__(
        self, every: int, device: torch.device, sinks: Sequence[Sink] = (), *, last: int | None = None
    ) -> None:
        self.every, self.sinks, self.last = every, sinks, last
        self.device, self.work = device, Work()
        self.latest: dict[str, Any] = {}  # what the last entry said, on rank 0
        self.is_profiled = False
        self._total: dict[str, float] = dict.fromkeys(("step", *PHASES), 0.0)
        self._seconds: dict[str, float] = {}
        self._clock: Any = _DeviceClock() if device.type == "cuda" else _HostClock()
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._count: float | torch.Tensor
        self._begun: Any = None
        self._clear()

    @contextlib.contextmanager
    def phase(self, name: str, loss: torch.Tensor | None = None) -> Iterator[None]:
        """Count the time of the block as this phase of the step, one of `PHASES`.

        "backward" takes what backward is called on in it. It gets a hook that tells when this rank's own
        gradients are complete; the time from there on is then counted as "reduce".
        """
        clock, ends = self._clock, []
        if loss is not None and loss.requires_grad:
            # When the graph is done, the engine calls what was queued, in that order. DDP queues its wait for
            # the reductions with the last gradient; this is queued with the first one, and so called before.
            queue = torch.autograd.Variable._execution_engine.queue_callback
            loss.register_hook(lambda _: queue(lambda: ends.append(clock.now())))
        heartbeat.phase(name)
        record = torch.profiler.record_function if self.is_profiled else contextlib.nullcontext
        mark = record(f"step: {name}")
        start = clock.now()
        if self._begun is None:  # the first phase begins the step: what lies between steps is not training
            self._begun = start
        try:
            with mark:
                yield
        finally:
            ends.append(clock.now())
            for part, begin, end in zip((name, "reduce"), (start, *ends), ends, strict=False):
                clock.add(self._seconds, part, begin, end)

    def due(self, number: int) -> bool:
        """Return whether the interval ends with this step, so that its gradient norm will be written."""
        return number % self.every == 0 or number == self.last

    def add(self, loss_sum: torch.Tensor, count: float | torch.Tensor) -> None:
        """Count the losses of a forward pass: their sum, a scalar on the device, and how many they are."""
        self._loss += loss_sum.detach()
        self._count = self._count + count

    def step(
        self,
        number: int,
        *,
        samples: int,
        lr: float,
        epochs: float,
        grad_norm: torch.Tensor | float | None = None,
    ) -> float | None:
        """End an optimizer step, and write an entry if the interval ends with it.

        Args:
            number: optimizer steps done since the beginning, with this one.
            samples: samples of the step, over all ranks.
            epochs: epochs done so far, with their fraction.
            grad_norm: of the whole gradient, before it was clipped; needed only where `due(number)`.

        Returns:
            The mean loss of all ranks over the interval, where it ends and something was counted in it.
        """
        now = self._clock.now()
        if self._begun is not None:
            self._clock.add(self._seconds, "step", self._begun, now)
            self._begun = None
        self._clock.settle(self._seconds)
        self._samples += samples
        self._steps += 1
        if not self.due(number):
            return None
        norm = None if grad_norm is None else float(grad_norm)
        entry = {"step": number, "epochs": round(epochs, 6), "lr": lr, "grad_norm": norm}
        entry |= self._of_interval()
        self._clear()
        self.latest = entry
        self.write(entry, number)
        return entry["loss"]

    def write(self, entry: Mapping[str, Any], step: int) -> None:
        """Write an entry of any kind, given on rank 0. A collective."""
        with collectives.fail_together():
            for sink in self.sinks:
                sink.write(entry, step)

    def seconds(self) -> dict[str, float]:
        """Return this rank's seconds in the interval: of whole steps as "step", and by phase."""
        self._clock.settle(self._seconds, wait=True)
        return dict(self._seconds)

    def total(self) -> dict[str, float]:
        """Return this rank's seconds since the start, as `seconds`."""
        return {name: self._total[name] + value for name, value in self.seconds().items()}

    def state(self) -> list[float]:
        """Return this rank's sums of the unfinished interval, for a checkpoint: all but the times."""
        return [float(self._steps), float(self._loss), float(self._count)]

    def restore(self, states: Sequence[Sequence[float]], rank: int, world_size: int) -> None:
        """Continue an unfinished interval, from `state()` of each rank that saved.

        If the ranks have become more or fewer, rank 0 takes the sums of all of them.
        """
        if any(len(state) != 3 for state in states):
            raise ValueError(f"the state of a log has {len(states[0])} numbers")
        same = len(states) == world_size
        steps, loss, count = states[rank] if same else states[0]
        if not same:
            loss, count = (sum(state[i] for state in states) if rank == 0 else 0.0 for i in (1, 2))
        self._steps, self._count = int(steps), count
        self._loss.fill_(loss)

    def _of_interval(self) -> dict[str, Any]:
        """Return the mean loss over all ranks' samples in the interval, and the means of the ranks' times."""
        sums = [float(self._loss), float(self._count), *self.seconds().values()]
        loss, count, *seconds = collectives.total(torch.tensor(sums, dtype=torch.float64)).tolist()
        ranks = collectives.world_size()
        step, *phases = (round(value / ranks, 6) for value in seconds)
        return {
            "loss": loss / count if count else None,
            "steps": self._steps,
            "samples_per_second": round(self._samples / step, 3) if step else None,
            **(self.work.rates(self._samples, count, step) if step else {}),
            "peak_memory": peak_memory(self.device),
            "seconds": step,
            **{f"{name}_seconds": value for name, value in zip(PHASES, phases, strict=True)},
        }

    def _clear(self) -> None:
        self._loss.zero_()
        self._count = 0
        self._steps = self._samples = 0
        for name, value in self._seconds.items():
            self._total[name] += value
        self._seconds = dict.fromkeys(("step", *PHASES), 0.0)


class _HostClock:
    """The clock of a device whose work is done when its call returns."""

    now = staticmethod(time.perf_counter)

    def add(self, seconds: dict[str, float], name: str, start: float, end: float) -> None:
        seconds[name] += end - start

    def settle(self, seconds: dict[str, float], *, wait: bool = False) -> None:
        pass  # what was added is counted


Event = torch.cuda.Event


class _DeviceClock:
    """The clock of a GPU: events on its stream, read when they have passed, without waiting for them."""

    def __init__(self) -> None:
        self._spans: collections.deque[tuple[str, Event, Event]] = collections.deque()

    def now(self) -> Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, seconds: dict[str, float], name: str, start: Event, end: Event) -> None:
        self._spans.append((name, start, end))

    def settle(self, seconds: dict[str, float], *, wait: bool = False) -> None:
        while self._spans:
            name, start, end = self._spans[0]
            if wait:
                end.synchronize()
            elif not end.query():
                return
            seconds[name] += start.elapsed_time(end) / 1e3
            self._spans.popleft()


# ---- profiling ---------------------------------------------------------------------------------------

# It writes profile/trace.json.gz, for ui.perfetto.dev, and profile/operators.txt.


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
