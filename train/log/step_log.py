"""The log of a run while it trains: loss, learning rate, gradient norm, speed, and where the time goes.

    log = StepLog(50, device, sinks)
    with log.phase("backward", loss):
        loss.backward()
    log.add(loss, count)
    log.step(number, samples=..., lr=..., epochs=...)

A step reads the clock some ten times and adds the loss to a sum on the device. Nothing is read from the
device, and nothing is sent, but once per interval.

On a CPU, a phase is the time that this rank spent in it. On a GPU, where kernels run long after they were
launched, it is the time between two events on its stream, which includes the time it stood idle there.

DDP sums gradients over ranks while backward is still computing others, so the two can't be told apart in
full. `backward` ends when this rank has computed its own gradients; `reduce` is what it then waits until they
are summed: communication that computing does not hide, and the wait for slower ranks.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ckpttool.distributed import collectives, heartbeat
from train.log.speed import Work, peak_memory

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
        mark = (
            torch.profiler.record_function(f"step: {name}") if self.is_profiled else contextlib.nullcontext()
        )
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


class _DeviceClock:
    """The clock of a GPU: events on its stream, read when they have passed, without waiting for them."""

    def __init__(self) -> None:
        self._spans: collections.deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = collections.deque()

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(
        self, seconds: dict[str, float], name: str, start: torch.cuda.Event, end: torch.cuda.Event
    ) -> None:
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
