"""`--profile`: which steps are recorded, what is written, and that the training is as without it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import runs
from tests.ranks.runs import contents
from train import main
from train.log.step_log import PHASES, Profile, StepLog


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


def test_one_without_any_of_the_steps_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given: list[Any] = ["--data", "fake:20", "--batch-size", "10", "--epochs", "1", "--out", "run"]
    assert main.main([*given, "--profile", "3"]) == 0
    assert "warning: --profile 3: the run has taken none of these steps\n" in capsys.readouterr().err
    assert not Path("run/profile").exists()


def test_a_disk_that_takes_no_trace_ends_no_run(run_ranks, tmp_path):
    tmp_path.joinpath("run").mkdir()
    tmp_path.joinpath("run", "profile").touch()
    said = run_ranks(1, runs.run, runs.steady, str(tmp_path / "run"), {"profile": "2-3"})[0]
    assert "saved " in said and "profile steps" not in said
