"""The log of steps: exact losses over all ranks, honest times, and no trace in the training."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpttool.errors import CkptToolError, FileError
from tests.support.run_log import timeless
from train.log import step_log
from train.log.step_log import StepLog

CPU = torch.device("cpu")


class Kept(list[dict[str, Any]]):
    """A sink that keeps what it gets."""

    def write(self, entry: Any, step: int) -> None:
        self.append({**entry, "at": step})


class Full:
    """A sink on a disk that is full."""

    def write(self, entry: Any, step: int) -> None:
        raise FileError("log.jsonl", "could not be written: no space left on device")


def logging(every: int, rank: int = 0, **more: Any) -> tuple[StepLog, Kept]:
    """Return a log, and what rank 0 gets of it."""
    kept = Kept()
    return StepLog(every, CPU, [kept] if rank == 0 else [], **more), kept


def take(log: StepLog, number: int, loss: float, count: int = 1, **more: Any) -> None:
    given = {"samples": 8, "lr": 0.1, "epochs": number / 10, **more}
    log.add(torch.as_tensor(loss), count)
    log.step(number, **given)


def test_an_entry_has_the_mean_of_its_interval_and_the_rates_of_its_last_step():
    log, kept = logging(3)
    for number in range(1, 7):
        norm = torch.tensor(float(number)) if log.due(number) else None
        take(log, number, loss=float(number), count=2, lr=1 / number, grad_norm=norm)
    assert timeless(kept) == [
        {"step": 3, "at": 3, "epochs": 0.3, "steps": 3, "loss": 1.0, "lr": 1 / 3, "grad_norm": 3.0},
        {"step": 6, "at": 6, "epochs": 0.6, "steps": 3, "loss": 2.5, "lr": 1 / 6, "grad_norm": 6.0},
    ]


def test_the_last_step_of_a_training_ends_an_interval_too():
    log, kept = logging(3, last=4)
    for number in range(1, 5):
        take(log, number, loss=float(number), grad_norm=1.5 if log.due(number) else None)
    found = [(entry["step"], entry["steps"], entry["loss"], entry["grad_norm"]) for entry in kept]
    assert found == [(3, 3, 2.0, 1.5), (4, 1, 4.0, 1.5)]


def test_tokens_may_be_counted_on_the_device():
    log, kept = logging(2)
    take(log, 1, loss=6.0, count=torch.tensor(3))
    take(log, 2, loss=4.0, count=torch.tensor(2))
    assert kept[0]["loss"] == 2.0


def test_a_loss_is_summed_in_double_precision():
    log, kept = logging(1000)
    for number in range(1, 1001):
        take(log, number, loss=0.1)
    assert kept[0]["loss"] == pytest.approx(float(torch.tensor(0.1)), rel=1e-15)


def test_phases_are_timed_and_what_lies_between_steps_is_not(monkeypatch):
    now = 5.0
    monkeypatch.setattr(step_log._HostClock, "now", lambda _: now)
    log, kept = logging(2)
    for number in (1, 2):
        with log.phase("data"):
            now += 0.5
        now += 0.125  # of the step, but of no phase
        with log.phase("forward"):
            now += 0.25
        take(log, number, loss=1.0)
        now += 8.0  # an evaluation, a save
    entry = kept[0]
    assert (entry["data_seconds"], entry["forward_seconds"], entry["seconds"]) == (1.0, 0.5, 1.75)
    assert entry["samples_per_second"] == pytest.approx(16 / 1.75, rel=1e-3)


def test_a_phase_that_does_not_exist_is_refused():
    with pytest.raises(KeyError), StepLog(1, CPU).phase("sleep"):
        pass


class Event:
    """A stand-in for a GPU's event, which passes long after it was recorded."""

    recorded: list[Event] = []  # noqa: RUF012
    passed = 0
    waits = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.number = len(Event.recorded)
        Event.recorded.append(self)

    def query(self) -> bool:
        return self.number < Event.passed

    def synchronize(self) -> None:
        if not self.query():
            Event.waits += 1
            Event.passed = self.number + 1

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query(), "times are known only after both have passed"
        return float(end.number - self.number)


def test_on_a_gpu_nothing_is_waited_for_within_an_interval(monkeypatch):
    """Without a GPU at hand, its events are stood in for: one millisecond apart, and each passed late."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **given: zeros(*size, dtype=given["dtype"]))
    kept = Kept()
    log = StepLog(3, torch.device("cuda"), [kept])
    for number in (1, 2, 3):
        with log.phase("data"):
            pass
        with log.phase("forward"):
            pass
        Event.passed = max(0, len(Event.recorded) - 4)
        assert Event.waits == 0
        take(log, number, loss=1.0)
    entry = kept[0]
    assert entry["data_seconds"] == entry["forward_seconds"] == pytest.approx(0.003)
    assert entry["seconds"] == pytest.approx(3 * 0.004)


# ---- several ranks -------------------------------------------------------------------------------------


def uneven(rank: int, world_size: int) -> list[dict[str, Any]]:
    log, kept = logging(2, rank)
    for number in range(1, 5):
        count = rank + number
        take(log, number, loss=float(count * number), count=count)
    return timeless(kept)


def test_the_loss_is_the_mean_over_all_ranks_samples_however_uneven(run_ranks):
    entries, *others = run_ranks(3, uneven)
    assert not any(others)
    for entry, numbers in zip(entries, ((1, 2), (3, 4)), strict=True):
        counts = [(rank + number, number) for rank in range(3) for number in numbers]
        assert entry["loss"] == sum(c * n for c, n in counts) / sum(c for c, _ in counts)


def full_disk(rank: int, world_size: int) -> str:
    try:
        take(StepLog(1, CPU, [Full()] if rank == 0 else []), 1, loss=1.0)
    except CkptToolError as error:
        return f"{type(error).__name__} {error.exit_code}: {error}"
    return "no error"


@pytest.mark.parametrize("size", [1, 2])
def test_if_rank_0_cant_write_every_rank_fails_and_none_waits(run_ranks, size):
    first, *others = run_ranks(size, full_disk)
    assert first == "FileError 3: log.jsonl: could not be written: no space left on device"
    assert all(other.startswith("RankFailed 3: rank 0 failed: log.jsonl") for other in others)


class Slow(torch.autograd.Function):
    """The identity, whose backward pass takes some seconds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None


def waiting(rank: int, world_size: int, loss_given: bool) -> tuple[list[dict[str, Any]], dict[str, float]]:
    model = DistributedDataParallel(nn.Linear(4, 4))
    log, kept = logging(3, rank)
    for number in range(1, 4):
        with log.phase("forward"):
            loss = Slow.apply(model(torch.ones(1, 4)), 0.2 * rank).sum()
        with log.phase("backward", loss if loss_given else None):
            loss.backward()
        if number == 3:
            seconds = log.seconds()
        take(log, number, loss=1.0)
    return kept, seconds


def test_waiting_for_a_slower_rank_is_reduction_and_not_backward(run_ranks):
    (entries, fast), (_, slow) = run_ranks(2, waiting, True)
    assert fast["backward"] < 0.3 and fast["reduce"] > 0.4, fast
    assert slow["backward"] > 0.6 and slow["reduce"] < 0.3, slow
    mean = (fast["reduce"] + slow["reduce"]) / 2
    assert entries[0]["reduce_seconds"] == pytest.approx(mean, abs=0.01)


def test_without_the_loss_nothing_is_said_about_the_reduction(run_ranks):
    (entries, _), _ = run_ranks(2, waiting, False)
    assert entries[0]["reduce_seconds"] == 0 and entries[0]["backward_seconds"] > 0.6


def trained(rank: int, world_size: int, logged: bool) -> tuple[str, Any]:
    torch.manual_seed(1)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Dropout(0.5), nn.Linear(50, 3))
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(rank)
    log, _ = logging(2, rank)
    phase: Any = log.phase if logged else contextlib.nullcontext
    for number in range(1, 8):
        with phase("data"):
            inputs = torch.rand(4, 20)
        with phase("forward"):
            loss = model(inputs).square().sum()
        with phase("backward", loss) if logged else phase():
            loss.backward()
        with phase("update"):
            optimizer.step()
            optimizer.zero_grad()
        if logged:
            take(log, number, loss)
    return [p.detach().clone().numpy().tobytes() for p in model.parameters()], torch.rand(3).tolist()


def test_logging_leaves_no_trace_in_weights_and_random_numbers(run_ranks):
    assert run_ranks(2, trained, True) == run_ranks(2, trained, False)


# ---- continuing ----------------------------------------------------------------------------------------


def take_on(log: StepLog, rank: int, steps: Iterable[int]) -> None:
    for number in steps:
        take(log, number, loss=0.1 * (number + rank), count=1 + rank)


def stopped(rank: int, world_size: int) -> tuple[list[float], list[dict[str, Any]]]:
    log, kept = logging(4, rank)
    take_on(log, rank, range(1, 7))
    state = log.state()
    take_on(log, rank, (7, 8))
    return state, timeless(kept)


def continued(rank: int, world_size: int, states: list[list[float]]) -> list[dict[str, Any]]:
    log, kept = logging(4, rank)
    log.restore(json.loads(json.dumps(states)), rank, world_size)
    take_on(log, rank, (7, 8))
    return timeless(kept)


def test_a_run_that_continues_within_an_interval_logs_what_the_uninterrupted_one_logs(run_ranks):
    (state, entries), (other, _) = run_ranks(2, stopped)
    assert run_ranks(2, continued, [state, other])[0] == entries[1:]


def on_other_ranks(rank: int, world_size: int, states: list[list[float]]) -> list[dict[str, Any]]:
    log, kept = logging(4, rank, last=7)
    log.restore(states, rank, world_size)
    take(log, 7, loss=0.0, count=0)
    return kept


def test_on_another_number_of_ranks_no_loss_is_lost_or_counted_twice(run_ranks):
    states = [[2.0, 1.5, 2.0], [2.0, 2.5, 3.0]]
    for ranks in (1, 3):
        entry = run_ranks(ranks, on_other_ranks, states)[0][0]
        assert (entry["loss"], entry["steps"]) == (4.0 / 5.0, 3)


def test_a_state_of_another_length_is_refused():
    with pytest.raises(ValueError, match="5 numbers"):
        StepLog(4, CPU).restore([[1.0] * 5], 0, 1)
