"""The count of failures of a step, over starts of a run."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from ckpttool.errors import CheckFailed
from train.config.training import TrainConfig
from train.run.folder import ATTEMPTS as FILE
from train.run.folder import attempts as counted

CONFIG = TrainConfig(resume="auto")


def attempt(folder: Path, *steps: int, config: TrainConfig = CONFIG, rank: int = 0) -> None:
    """Start a run in a process of its own, which begins these steps and is then killed."""
    child = os.fork()
    if child == 0:
        with counted(str(folder), config, rank) as begin:
            for step in steps:
                begin(step)
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def refused(folder: Path, config: TrainConfig = CONFIG) -> str:
    """Return the error of the next start; empty if it may go on."""
    try:
        with counted(str(folder), config, 0):
            return ""
    except CheckFailed as error:
        assert f"rm {folder}/{FILE}" in str(error.hint)
        return str(error)


def test_the_third_failure_of_a_step_in_a_row_is_the_last(tmp_path):
    for _ in range(3):
        attempt(tmp_path, 7, 8, 9)
    said = "step 9 has failed 3 times in a row, and is not tried again"
    assert [refused(tmp_path), refused(tmp_path)] == [said, said]
    (tmp_path / FILE).unlink()
    assert refused(tmp_path) == ""


@pytest.mark.parametrize(
    "ends",
    [(9, 9), (9, 9, 12), (9, 12, 9), (9, 9, 0, 12), (3, 9, 15)],
    ids=["twice", "then further", "then before", "then at its start, then further", "at others"],
)
def test_failures_of_other_steps_do_not_count_together(tmp_path, ends):
    for step in ends:
        attempt(tmp_path, *[step] * (step > 0))
    assert refused(tmp_path) == ""


def test_a_start_that_ends_before_its_first_step_is_not_counted(tmp_path):
    for _ in range(4):
        attempt(tmp_path)
    assert refused(tmp_path) == ""
    for steps in ([9], [9], [], [9]):
        attempt(tmp_path, *steps)
    assert refused(tmp_path).startswith("step 9")


def test_a_step_that_is_taken_back_is_not_counted(tmp_path):
    for _ in range(4):
        attempt(tmp_path, 8, 9, 0)
        with pytest.raises(ZeroDivisionError), counted(str(tmp_path), CONFIG, 0) as begin:
            begin(9)
            raise ZeroDivisionError
        begin(0)  # what ended the run is known only afterwards
    assert refused(tmp_path) == ""


def test_rank_0_may_be_a_step_behind_the_rank_that_fails(tmp_path):
    for step in (9, 8, 9):
        attempt(tmp_path, step)
    assert refused(tmp_path).startswith("step 9")


def test_a_run_that_ends_well_or_is_interrupted_leaves_no_count(tmp_path):
    for _ in range(2):
        attempt(tmp_path, 9)
    with pytest.raises(KeyboardInterrupt), counted(str(tmp_path), CONFIG, 0) as begin:
        begin(9)
        raise KeyboardInterrupt
    assert not (tmp_path / FILE).exists()
    with counted(str(tmp_path), CONFIG, 0) as begin:
        begin(9)
        assert json.loads((tmp_path / FILE).read_text())["step"] == 9
    assert not (tmp_path / FILE).exists()


def test_an_error_is_counted_as_a_failure(tmp_path):
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), counted(str(tmp_path), CONFIG, 0) as begin:
            begin(9)
            raise ZeroDivisionError
    assert refused(tmp_path).startswith("step 9")


def test_another_flag_begins_a_new_count_and_resume_is_none(tmp_path):
    for config in (replace(CONFIG, resume=None), CONFIG, CONFIG):
        attempt(tmp_path, 9, config=config)
    assert refused(tmp_path)
    assert refused(tmp_path, replace(CONFIG, workers=1)) == ""


def test_other_ranks_touch_no_file(tmp_path):
    attempt(tmp_path, 9, rank=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", '{"flags": 1}', '{"flags": "x", "failed": 3, "step": "y"}'),
        *("[" * 100_000, '{"a":' * 100_000, "1" * 100_000, '{"failed": [' + "9," * 10**6),
        *(f'{{"flags": FLAGS, "failed": [9, 9], "step": {step}}}' for step in ("1e400", "NaN", "true")),
    ],
)
def test_a_file_that_is_damaged_counts_nothing(tmp_path, text):
    attempt(tmp_path, 9)
    flags = json.loads((tmp_path / FILE).read_text())["flags"]
    (tmp_path / FILE).write_text(text.replace("FLAGS", json.dumps(flags)))
    assert refused(tmp_path) == ""
