"""A run that is told to end saves, ends after the same step on every rank, and resumes to the same bits."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import runs, trainings
from tests.ranks.forked import Program
from tests.ranks.programs import ROOT, TORCHRUN, environment, own_model, start
from tests.support.run_log import entries_of, timeless
from train.config.sections import TrainConfig
from train.main import train
from train.run import run
from train.run.run import Job
from train.tasks import builtin as tasks
from train.trainer.progress import Scorer
from train.trainer.trainer import Trainer

SELDOM = {"save_every": runs.Every(9, "epochs")}


def told(
    rank: int, size: int, folder: str, on: list[int], how: tuple[str, int], settings: dict[str, Any]
) -> int:
    """Run the trainer, and return its exit code.

    Args:
        on: the ranks that get a signal.
        how: when: ("update", steps done before) or ("evaluate", batches scored before).
        settings: of the run; `signal` is the signal, and `long` the seconds of a long step.
    """
    number, long = settings.pop("signal", signal.SIGTERM), settings.pop("long", run.LONG)
    usual = {"epochs": 2, "batch_size": runs.BATCH, "lr": 0.05, "timeout": 20.0, "eval_batch": 2, **SELDOM}
    config = TrainConfig.of(**{"out": folder, **usual, **settings})
    data, model = trainings.tensors(runs.SHAPE, runs.SAMPLES), trainings.seeded(runs.restless)
    (where, when), calls = how, itertools.count()

    with pytest.MonkeyPatch.context() as patch:
        owner, name = (Trainer, "update") if where == "update" else (Scorer, "_check")
        usual_way = getattr(owner, name)

        def struck(*given: Any) -> Any:
            if next(calls) == when and rank in on:
                os.kill(os.getpid(), number)
                time.sleep(0.1)  # a thread takes it
            return usual_way(*given)

        patch.setattr(owner, name, struck)
        patch.setattr(run, "SPACING", 0.0)  # these steps take milliseconds
        patch.setattr(run, "LONG", long)
        job = Job(
            config,
            trainings.place(rank, size),
            data,
            model,
            tasks.build(config, data),
            [],
        )
        with contextlib.redirect_stdout(None):
            return train(job)


def log(folder: Path) -> list[dict[str, Any]]:
    return timeless([entry for entry in entries_of(folder) if "event" not in entry])


@pytest.fixture(scope="module")
def undisturbed(run_ranks, tmp_path_factory) -> Callable[[int, dict[str, Any]], Path]:
    """`undisturbed(size, settings)`: the folder of a run that is told nothing; each is run once."""
    folders: dict[str, Path] = {}

    def whole(size: int, settings: dict[str, Any]) -> Path:
        settings = {name: value for name, value in settings.items() if name not in ("signal", "long")}
        if (key := repr((size, settings))) not in folders:
            folders[key] = tmp_path_factory.mktemp("whole")
            assert run_ranks(size, told, str(folders[key]), [], ("update", 1), settings) == [0] * size
        return folders[key]

    return whole


@pytest.fixture
def stopped(run_ranks, undisturbed, tmp_path) -> Callable[..., dict[str, Any]]:
    """`stopped(size, on, how, settings)`: what a run saves that is told to end, as `told` is given it.

    Checks that the run, resumed, ends as one that is not told anything.
    """

    def stop(size: int, on: list[int], how: tuple[str, int], settings: dict[str, Any]) -> dict[str, Any]:
        whole, number = undisturbed(size, settings), settings.get("signal", signal.SIGTERM)
        assert run_ranks(size, told, str(tmp_path), on, how, settings) == [128 + number] * size
        saved = runs.read(tmp_path / "last.pt")
        resumed = {**settings, "resume": "auto"}
        assert run_ranks(size, told, str(tmp_path), [], how, resumed) == [0] * size
        assert runs.different(runs.read(whole / "last.pt"), runs.read(tmp_path / "last.pt")) == []
        assert log(tmp_path) == log(whole)
        return saved

    return stop


@pytest.mark.covered(lambda size, on, number: size == 3 and (on, number) != ([1], signal.SIGTERM))
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda n: n.name)
@pytest.mark.parametrize(("size", "on"), [(1, [0]), (3, [1]), (3, [0, 2])])
def test_a_signal_to_any_rank_ends_all_after_one_step(stopped, size, on, number):
    saved = stopped(size, on, ("update", 1), {"signal": number})
    assert saved["progress"]["global_step"] == (2 if size == 1 else 3)


def test_a_long_step_is_the_last_if_a_signal_comes_in_it(stopped):
    saved = stopped(2, [1], ("update", 1), {"long": 0.0})
    assert saved["progress"]["global_step"] == 2


HELD: list[dict[str, Any]] = [{"virtual_ranks": 6}, {"zero": True, "ema": 0.9}]
HELD += [{"batchnorm": "pooled", "save": "sync"}, {"eval_every": runs.Every(1, "steps")}]


@pytest.mark.covered(lambda settings: "zero" in settings or "batchnorm" in settings)
@pytest.mark.parametrize("settings", HELD, ids=lambda settings: next(iter(settings)))
def test_whatever_a_run_holds_is_saved_at_a_signal(stopped, settings):
    stopped(2, [1], ("update", 1), settings)


@pytest.mark.covered(
    lambda when, size, on: (size, on) == (2, [0]) or (size > 1 and (when == 0) == (size == 3))
)
@pytest.mark.parametrize(("size", "on"), [(1, [0]), (2, [0]), (2, [1]), (3, [1, 2])])
@pytest.mark.parametrize("when", [0, 5], ids=["in the first epoch", "at the end"])
def test_a_signal_cuts_an_evaluation_short_and_the_resumed_run_begins_with_it(stopped, size, on, when):
    when = 0 if when == 0 else -(-5 // size)  # of five batches in each evaluation
    saved = stopped(size, on, ("evaluate", when), {})
    assert saved["progress"]["unscored"]
    assert saved["progress"]["global_step"] == (6 if when else 3)


def test_the_log_says_which_signal_came_and_how_much_of_the_grace_was_left(run_ranks, tmp_path):
    run_ranks(2, told, str(tmp_path), [1], ("update", 1), {"grace": 20.0})
    (entry,) = entries_of(tmp_path)
    assert entry["event"] == "SIGTERM" and entry["step"] in (2, 3)
    assert entry["seconds"] + entry["grace_left"] == pytest.approx(20.0, abs=0.01)


# ---- in processes of their own -------------------------------------------------------------------------

SLOW = 'time.sleep({seconds})\n(marks / ("pid-" + rank + "-" + str(os.getpid()))).touch()'

FLAGS = ["--data", "fake:400", "--batch-size", "4", "--model", "own.py:model"]
FLAGS += ["--out", "run", "--log-every", "1"]


@contextlib.contextmanager
def running(folder: Path, command: list[str], seconds: float | str = 0.05) -> Iterator[Program]:
    """Start a program, and wait until each rank has taken some steps; kill what is left."""
    own_model(folder, SLOW.format(seconds=seconds), "self.training and torch.is_grad_enabled()")
    run = Program(command, folder, environment(PYTHONPATH=str(ROOT)))
    try:
        end = time.monotonic() + 90
        while not steps_logged(folder) > 1:
            assert run.poll() is None and time.monotonic() < end, run.communicate()
            time.sleep(0.02)
        yield run
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)


def steps_logged(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (folder / "run" / "log.jsonl").read_text().count("grad_norm")
    return 0


def pid_of(folder: Path, rank: int) -> int:
    """Return the process id of a rank that has made a pass."""
    (mark,) = folder.glob(f"pid-{rank}-*")
    return int(mark.name.split("-")[-1])


def program(*flags: str) -> list[str]:
    return [sys.executable, str(ROOT / "train" / "main.py"), *FLAGS, *flags]


def step_of(folder: Path) -> int:
    return int(torch.load(folder / "run" / "last.pt", weights_only=True)["progress"]["global_step"])


SPAWN = program("--spawn", "2")
TOLD: dict[str, tuple[list[str], str | int, int]] = {
    "all processes of spawn": (program("--workers", "2", "--spawn", "2"), "all", signal.SIGTERM),
    "spawn": (SPAWN, "launcher", signal.SIGUSR1),
    "rank 0 of spawn": (SPAWN, 0, signal.SIGUSR1),
    "rank 1 of spawn": (SPAWN, 1, signal.SIGUSR1),
    "torchrun": ([*TORCHRUN, "2", *program()[1:]], "launcher", signal.SIGTERM),
}


@pytest.mark.covered(lambda whom: whom in ("rank 0 of spawn", "rank 1 of spawn", "spawn"))
@pytest.mark.parametrize("whom", TOLD)
def test_a_signal_to_any_process_of_a_run_ends_and_saves_it(tmp_path, whom):
    """Processes that load data outlive one to all, until their rank ends."""
    command, who, number = TOLD[whom]
    with running(tmp_path, command) as run:
        if who == "all":
            os.killpg(run.pid, number)
        else:
            os.kill(run.pid if who == "launcher" else pid_of(tmp_path, int(who)), number)
        said, errors = run.communicate(timeout=60)
    assert f"ended   by {signal.Signals(number).name} after step" in said, errors
    assert step_of(tmp_path) >= 2
    if whom != "torchrun":
        assert (run.returncode, errors) == (128 + number, "")
        assert "\nto continue:\n  python" in said


def failed_at(folder: Path) -> int:
    """Return the step that is noted as the one that has failed; 0 if none has."""
    return int(json.loads((folder / "run" / "attempts.json").read_text())["step"])


@pytest.mark.long
def test_a_second_ctrl_c_ends_at_once_and_leaves_the_old_file(tmp_path):
    stuck = "99.0 * (next(passes) > 6)"  # longer than what follows may take
    with running(tmp_path, program("--save-every", "1steps"), seconds=stuck) as run:
        time.sleep(1.0)
        before = step_of(tmp_path)
        run.send_signal(signal.SIGINT)
        time.sleep(0.3)
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert errors.startswith("\ninterrupted; to continue:\n  python ")
    assert (step_of(tmp_path), failed_at(tmp_path)) == (before, 0)


@pytest.mark.long
def test_a_step_that_takes_longer_than_the_grace_is_said(tmp_path):
    with running(tmp_path, program("--grace", "0.5"), seconds=3.0) as run:
        time.sleep(1.0)
        run.terminate()
        _, errors = run.communicate(timeout=60)
    assert (run.returncode, failed_at(tmp_path)) == (1, 0)
    assert errors.startswith("error: --grace 0.5: SIGTERM came ")
    assert errors.endswith("nothing was saved yet (--save-every N[steps|epochs])\n")


@pytest.mark.long
def test_the_grace_of_another_rank_is_no_failure_of_the_step(tmp_path):
    only_there = "3.0 * (rank == '1')"
    with running(tmp_path, program("--grace", "1", "--spawn", "2"), seconds=only_there) as run:
        time.sleep(0.5)
        os.kill(pid_of(tmp_path, 1), signal.SIGTERM)
        _, errors = run.communicate(timeout=60)
    assert (run.returncode, failed_at(tmp_path)) == (1, 0)
    assert re.match(r"error: rank 0: rank 1 was ended by SIGTERM in 'forward' of step \d", errors)


def test_ctrl_c_before_there_are_ranks_is_one_line(tmp_path):
    """Under an import, where an interrupt may be lost or end in a traceback."""
    (tmp_path / "torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), 2)\ntime.sleep(9)\n")
    done = start(program("--spawn", "2"), tmp_path, anew=True, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_before_the_first_step_ends_the_run_in_one_line(tmp_path, number):
    waits = "def model():\n    open('here', 'w')\n    __import__('time').sleep(99)\n"
    (tmp_path / "own.py").write_text(waits)
    run = Program(program(), tmp_path, environment())
    end = time.monotonic() + 60
    while not (tmp_path / "here").exists() and time.monotonic() < end:
        time.sleep(0.05)
    run.send_signal(number)
    said = run.communicate(timeout=30)
    assert run.returncode == 128 + number
    assert said == ("", f"ended by {number.name} before the first step; nothing more was trained\n")
