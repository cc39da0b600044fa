"""`--keep-deltas`: a run that is killed, or told to end, while it makes a delta goes on to the same bits."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import runs
from tests.ranks.forked import Program
from tests.ranks.programs import ROOT, environment
from tests.support.run_log import EVERY, SETTINGS, delta, same, state_of, steps_in
from train.checkpoint import deltas
from train.checkpoint.files import numbered

STEPS = range(1, 7)

OWN = """
import os, signal, threading, time
from pathlib import Path
from torch import nn
from train.checkpoint import deltas

here, usual = Path(__file__).parent, deltas.keep_delta

def keep_delta(folder, step, *given):
    order = here / f"kill-{step}"
    if order.exists():
        seconds = float(order.read_text())
        order.unlink()
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    began = time.monotonic()
    failure = usual(folder, step, *given)
    (here / f"took-{step}").write_text(str(time.monotonic() - began))
    return failure

deltas.keep_delta = keep_delta

def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 200), nn.ReLU(), nn.Linear(200, 10))
"""

FLAGS = ["--data", "fake:40", "--batch-size", "8", "--max-steps", "6", "--save-every", "1steps", "--momentum"]
FLAGS += ["0.9", "--keep-deltas", str(EVERY), "--model", "own.py:model", "--out", "run"]


def train(folder: Path, *flags: str) -> int:
    folder.mkdir(exist_ok=True)
    (folder / "own.py").write_text(OWN)
    command = [sys.executable, str(ROOT / "train" / "main.py"), *FLAGS, *flags]
    run = Program(command, folder, environment(PYTHONPATH=str(ROOT)))
    _, errors = run.communicate(timeout=90)
    assert run.returncode in (0, -signal.SIGKILL), errors
    return run.returncode


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("undisturbed")
    assert train(folder) == 0
    return folder


@pytest.mark.long
@pytest.mark.parametrize("number", range(10))
def test_a_kill_at_any_moment_of_a_delta_costs_no_step(
    undisturbed: Path, tmp_path: Path, number: int
) -> None:
    step, straight, run = (2, 3, 5)[number % 3], undisturbed / "run", tmp_path / "run"
    seconds = float((undisturbed / f"took-{step}").read_text()) * 1.2 * (number + 0.5) / 10
    (tmp_path / f"kill-{step}").write_text(str(seconds))
    mode = ("--save", "async" if number % 2 else "sync")
    assert train(tmp_path, *mode) == -signal.SIGKILL
    assert all(same(state_of(run, earlier), state_of(straight, earlier)) for earlier in range(1, step + 1))
    assert train(tmp_path, *mode, "--resume", "auto") == 0
    assert all(same(state_of(run, each), state_of(straight, each)) for each in STEPS)
    assert same(run / "last.pt", straight / "last.pt")
    assert [name for name in os.listdir(run) if name.startswith(".")] == []
    assert len(steps_in(run)) <= len(steps_in(straight)) + 1


def told_in_a_delta(rank: int, size: int, folder: str, settings: dict[str, Any]) -> str:
    """Run the trainer, which is told to end while it makes the delta of step 3."""
    usual = deltas.keep_delta

    def struck(where: str, step: int, every: int, training: str) -> str:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)  # a thread takes it
        return usual(where, step, every, training)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltas, "keep_delta", struck)
        return runs.run(rank, size, runs.restless, folder, settings)


@pytest.mark.covered(lambda save: save == "sync")
@pytest.mark.parametrize("save", ["sync", "async"])
def test_a_run_that_is_told_to_end_within_a_delta_completes_it(
    run_ranks: Any, tmp_path: Path, save: str
) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    run_ranks(1, runs.run, runs.restless, str(straight), {**SETTINGS, "keep": 99})
    settings = {**SETTINGS, "keep_deltas": EVERY, "save": save}
    run_ranks(1, told_in_a_delta, str(run), settings)
    last = max(step for step in STEPS if (run / numbered(step)).exists())
    assert 3 <= last < 6 and delta(3) <= steps_in(run)
    run_ranks(1, runs.run, runs.restless, str(run), {**settings, "resume": "auto"})
    assert all(same(state_of(run, step), straight / numbered(step)) for step in STEPS)
    assert same(run / "last.pt", straight / "last.pt")
