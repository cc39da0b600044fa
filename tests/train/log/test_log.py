"""What is logged: the file, the steps, their profile."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpttool.errors import CkptToolError, Damaged, FileError, Unreadable
from ckpttool.inspecting import run_log
from tests.ranks import runs, trainings
from tests.ranks.runs import contents
from tests.support.run_log import entries_of, timeless
from train import main
from train.log import step_log
from train.log.step_log import PHASES, Profile, StepLog


def test_a_log_that_cant_be_written_is_an_error_that_names_it(tmp_path):
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(FileError, match=r"log\.jsonl: could not be written"):
        step_log.append_entry(str(tmp_path), {"epoch": 1})


def test_a_loss_of_nan_is_null_in_the_log(tmp_path):
    infinite = {"mse": float("inf"), "each": [1.0, float("nan")]}
    step_log.append_entry(str(tmp_path), {"epoch": 1, "loss": float("nan"), "metrics": infinite})
    (text,) = (tmp_path / "log.jsonl").read_text().splitlines()
    assert text == '{"epoch": 1, "loss": null, "metrics": {"mse": null, "each": [1.0, null]}}'


def test_cutting_removes_later_epochs_and_a_line_cut_off_by_a_crash(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"epoch": 1}\n{"epoch": 2}\n{"epoch": 3}\n{"epo')
    step_log.cut_log(str(tmp_path), epoch=2, step=10)
    assert (tmp_path / "log.jsonl").read_text() == '{"epoch": 1}\n{"epoch": 2}\n'


LOG = [{"step": 2}, {"step": 4}, {"epoch": 1}, {"note": "x"}]
LOG += [{"step": 6}, {"step": 8}, {"epoch": 2}, {"a": 1}]


@pytest.mark.parametrize(
    ("epoch", "step", "kept"),
    [(0, 0, 0), (0, 3, 1), (0, 4, 2), (1, 4, 4), (1, 6, 5), (1, 7, 5), (1, 8, 6), (2, 8, 8), (9, 99, 8)],
)
def test_cutting_keeps_what_came_before_the_step_that_the_run_continues_from(tmp_path, epoch, step, kept):
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in LOG))
    step_log.cut_log(str(tmp_path), epoch=epoch, step=step)
    assert entries_of(tmp_path) == LOG[:kept]


def test_a_whole_last_line_without_a_line_break_is_kept_apart_from_the_next_one(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 2}')
    step_log.cut_log(str(tmp_path), epoch=0, step=2)
    step_log.append_entry(str(tmp_path), {"step": 4})
    assert entries_of(tmp_path) == [{"step": 2}, {"step": 4}]


def test_a_run_without_a_log_has_nothing_to_cut(tmp_path):
    step_log.cut_log(str(tmp_path), epoch=1, step=1)
    assert list(tmp_path.iterdir()) == []


def test_a_log_is_read_by_its_folder_or_its_own_path_without_a_line_cut_off(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 2}\n\n{"epoch": 1}\n{"st')
    for path in (tmp_path, tmp_path / "log.jsonl"):
        assert run_log.read(path) == [{"step": 2}, {"epoch": 1}]


@pytest.mark.parametrize("text", ["", "\n\n", '{"st'])
def test_a_log_without_entries_is_refused(tmp_path, text):
    (tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(Damaged, match="holds no entries yet"):
        run_log.read(tmp_path)


@pytest.mark.parametrize("line", [b"[1]", b"epoch 1", b'"epoch"', b"\xff\xfe", b"3", b"[" * 100_000])
def test_a_line_that_is_no_object_is_refused_by_its_number(tmp_path, line):
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 2}\n' + line + b'\n{"step": 4}\n')
    with pytest.raises(Damaged, match="line 2 is not a JSON object"):
        run_log.read(tmp_path)


def test_a_missing_log_is_refused_with_what_to_give(tmp_path):
    with pytest.raises(Unreadable, match=r"log\.jsonl: no such file") as refused:
        run_log.read(tmp_path)
    assert "folder of a run" in refused.value.hint


# ---- whole runs on several ranks -----------------------------------------------------------------------

EPOCHS, STEPS, SAMPLES = 2, 5, 55


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Dropout(0.2), nn.Linear(30, 10))


def run(rank: int, world_size: int, folder: str, settings: dict[str, Any]) -> str:
    """Train with a checkpoint of each step; return what was printed."""
    usual = {"epochs": EPOCHS, "batch_size": 12, "lr": 0.05, "out": folder, "log_every": 4, **runs.OFTEN}
    data, made = trainings.tensors((10,), SAMPLES), trainings.seeded(model)
    return runs.outcome(rank, world_size, data, made, {**usual, **settings})


@pytest.fixture(scope="module", params=[1, 3], ids=lambda size: f"{size}-ranks")
def whole(request: Any, run_ranks: Any, tmp_path_factory: Any) -> list[dict[str, Any]]:
    """The log of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    run_ranks(request.param, run, str(folder), {})
    return entries_of(folder)


def order_of(entries: list[dict[str, Any]]) -> list[tuple[int | None, ...]]:
    return [(entry.get("step"), entry.get("epoch"), entry.get("steps")) for entry in entries]


ORDER = [(4, None, 4), (None, 1, None), (8, None, 4), (10, None, 2), (None, 2, None)]


def test_a_log_is_in_the_order_of_the_training(whole):
    assert order_of(whole) == ORDER


def test_every_line_has_its_fields(whole):
    for entry in whole:
        if "epoch" in entry:
            wanted = {"loss", "accuracy", "correct", "samples", "seconds", "train_loss", "train_accuracy"}
            wanted |= {"train_seconds", "evaluate_seconds"}
            assert wanted | {"train_samples", "test_samples", "lr"} <= set(entry)
            assert (entry["train_samples"], entry["test_samples"], entry["samples"]) == (SAMPLES, 10, 10)
        else:
            wanted = {"epochs", "steps", "loss", "lr", "grad_norm", "samples_per_second", "seconds"}
            wanted |= {"peak_memory", "flops_per_second"}
            assert wanted | {f"{phase}_seconds" for phase in PHASES} <= set(entry)
            assert entry["epochs"] == entry["step"] / STEPS and entry["grad_norm"] > 0
            assert 0 < sum(entry[f"{phase}_seconds"] for phase in PHASES) <= entry["seconds"] * 1.001


def test_the_losses_of_steps_add_up_to_those_of_epochs(whole):
    """Of the whole training: intervals and epochs end at different steps, but both cover each step once."""
    samples = {4: 48, 8: SAMPLES + 36 - 48, 10: 2 * SAMPLES - SAMPLES - 36}
    by_step = math.fsum(e["loss"] * samples[e["step"]] for e in whole if "step" in e)
    by_epoch = math.fsum(e["train_loss"] * e["train_samples"] for e in whole if "epoch" in e)
    assert by_step == pytest.approx(by_epoch, rel=1e-12)


def test_training_longer_goes_on_with_the_log(run_ranks, tmp_path):
    run_ranks(2, run, str(tmp_path), {"scheduler": "none"})
    run_ranks(2, run, str(tmp_path), {"scheduler": "none", "resume": "auto", "epochs": 3})
    assert order_of(entries_of(tmp_path)) == [*ORDER, (12, None, 2), (15, None, 3), (None, 3, None)]


@pytest.mark.long
def test_on_another_number_of_ranks_an_interval_goes_on_with_the_same_sums(run_ranks, tmp_path):
    """The weights of the saved step are the same, so with a rate of almost nothing the losses are too."""
    settings = {"lr": 1e-9, "batch_size": 5, "log_every": 10}
    run_ranks(2, run, str(tmp_path / "two"), settings)
    saved = str(tmp_path / "two" / "step-000006.pt")
    run_ranks(1, run, str(tmp_path / "one"), {**settings, "resume": saved})
    two, one = (next(e for e in entries_of(tmp_path / name) if "steps" in e) for name in ("two", "one"))
    assert (two["step"], two["steps"]) == (one["step"], one["steps"]) == (10, 10)
    assert one["loss"] == pytest.approx(two["loss"], rel=0.05)  # dropout is drawn anew


def test_how_often_and_where_to_it_is_logged_changes_no_bit_of_the_weights(run_ranks, tmp_path):
    """Forced over the old run, TensorBoard shows only the new one."""
    pytest.importorskip("tensorboard")
    events = {"log_every": 1, "tracker": ("tensorboard",)}
    ends = []
    for name, settings in (("a", events), ("b", {"log_every": 999}), ("a", {**events, "force": True})):
        run_ranks(2, run, str(tmp_path / name), settings)
        ends.append(runs.contents(tmp_path / name / "last.pt", "model"))
    assert ends == [ends[0]] * 3
    assert len(list((tmp_path / "a" / "tensorboard").iterdir())) == 1


# ---- the log of steps: exact losses, honest times, no trace in the training ----------------------------


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


# ---- which steps are profiled --------------------------------------------------------------------------


def recorded(folder: Path) -> dict[str, int]:
    """Return how often each phase is in the trace."""
    with gzip.open(folder / "profile" / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = [str(event["name"]) for event in events if event.get("cat") == "user_annotation"]
    return {phase: names.count(f"step: {phase}") for phase in PHASES}


@pytest.mark.parametrize("size", [1, 2])
def test_the_steps_that_are_named_are_recorded_by_phase_and_no_bit_changes(run_ranks, tmp_path, size):
    run_ranks(size, runs.run, runs.restless, str(tmp_path / "without"), {})
    said = run_ranks(size, runs.run, runs.restless, str(tmp_path / "with"), {"profile": "2-4"})[0]
    assert contents(tmp_path / "with" / "last.pt") == contents(tmp_path / "without" / "last.pt")
    assert recorded(tmp_path / "with") == dict.fromkeys(PHASES, 3)
    table = said[said.index("profile ") :].splitlines()
    assert table[0].startswith("profile steps 2 to 4 of rank 0, ")
    assert [line.split()[0] for line in table[1:7]] == [*PHASES, "rest"]
    shares = [float(line.split()[-1].rstrip("%")) for line in table[1:7]]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert "aten::" in (tmp_path / "with" / "profile" / "operators.txt").read_text()


def log() -> StepLog:
    return StepLog(50, torch.device("cpu"))


def test_a_number_alone_is_of_steps_after_the_tenth_of_this_start(tmp_path):
    assert Profile("3", str(tmp_path), log()).steps == range(11, 14)
    assert Profile("3", str(tmp_path), log(), 100).steps == range(111, 114)
    assert Profile("7-7", str(tmp_path), log(), 100).steps == range(7, 8)


def test_a_run_that_ends_before_writes_what_it_has(run_ranks, tmp_path):
    said = run_ranks(1, runs.run, runs.steady, str(tmp_path), {"profile": "5-99"})[0]
    assert "profile steps 5 to 6 of rank 0" in said and recorded(tmp_path)["forward"] == 2


def test_one_without_any_of_the_steps_says_so(here, capsys):
    given: list[Any] = ["--data", "fake:20", "--batch-size", "10", "--epochs", "1", "--out", "run"]
    assert main.main([*given, "--profile", "3"]) == 0
    assert "warning: --profile 3: the run has taken none of these steps\n" in capsys.readouterr().err
    assert not Path("run/profile").exists()


def test_a_disk_that_takes_no_trace_ends_no_run(run_ranks, tmp_path):
    tmp_path.joinpath("run").mkdir()
    tmp_path.joinpath("run", "profile").touch()
    said = run_ranks(1, runs.run, runs.steady, str(tmp_path / "run"), {"profile": "2-3"})[0]
    assert "saved " in said and "profile steps" not in said
