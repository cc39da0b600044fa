"""The folder of a run: which are refused, what is cleared, and the count of failures of a step."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from ckpttool.errors import CheckFailed, Refused, UsageFault
from tests.ranks.forked import Program
from tests.ranks.programs import ROOT, environment
from train.checkpoint import files as checkpoint_files
from train.checkpoint import format as checkpoints
from train.config.sections import TrainConfig
from train.run import folder as run_folder
from train.run.folder import ATTEMPTS as FILE
from train.run.folder import attempts as counted

CONFIG = TrainConfig.of(resume="auto")


def claim(config: TrainConfig, now: str = "now") -> str:
    with run_folder.claimed(config.saving, now) as folder:
        return folder


@pytest.mark.parametrize("name", ["last.pt", "best.pt", "log.jsonl", "step-000007.pt"])
def test_a_folder_that_holds_a_run_is_refused_with_the_flags_to_give(name, tmp_path):
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(UsageFault, match="already holds a run") as fault:
        claim(TrainConfig.of(out=str(tmp_path)))
    assert all(flag in fault.value.hint for flag in ("--resume auto", "--force", "--out"))
    assert (tmp_path / name).read_bytes() == b"precious"


def test_force_clears_a_runs_own_files_and_no_others(tmp_path):
    torch.save({"progress": {"global_step": 7}, "digests": {}}, tmp_path / "step-000007.pt")
    for name in ("last.pt", "best.pt", "log.jsonl", "notes.txt", "step-x.pt", "step-000008.pt"):
        (tmp_path / name).touch()
    (tmp_path / "step-000009.pt").mkdir()
    assert claim(TrainConfig.of(out=str(tmp_path), force=True)) == str(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "step-000008.pt", "step-000009.pt", "step-x.pt"]


def test_without_out_each_run_has_a_new_folder_named_by_the_time(here):
    names = [claim(TrainConfig(), "20260101-120000") for _ in range(3)]
    assert names == [os.path.join("runs", f"20260101-120000{end}") for end in ("", "-2", "-3")]


def test_a_folder_that_cant_be_made_names_the_flag(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageFault, match="--out"):
        claim(TrainConfig.of(out=str(tmp_path / "file" / "run")))


@pytest.mark.skipif(not os.path.isdir("/sys/kernel"), reason="there is no folder that root can't write")
def test_a_folder_that_cant_be_written_is_refused_before_training():
    said = r"--out /sys/kernel: (permission denied|read-only|operation not perm)"
    with pytest.raises(UsageFault, match=said):
        claim(TrainConfig.of(out="/sys/kernel"))


def test_two_runs_in_one_folder_are_refused_whatever_the_flags(tmp_path):
    with run_folder.claimed(TrainConfig.of(out=str(tmp_path)).saving, "now") as folder:
        (tmp_path / "last.pt").write_bytes(b"of the first run")
        for flags in ({"force": True}, {"resume": "auto"}, {}):
            with pytest.raises(UsageFault, match="another run, or slim, writes there now"):
                claim(TrainConfig.of(out=folder, **flags))
    assert (tmp_path / "last.pt").read_bytes() == b"of the first run"
    assert claim(TrainConfig.of(out=folder, resume="auto")) == folder


def test_the_lock_of_a_folder_ends_with_its_process_even_if_a_loading_process_outlives_it(tmp_path):
    code = (
        "import os, sys, time; from train.run import folder as run_folder\n"
        "from train.config.sections import TrainConfig\n"
        f"with run_folder.claimed(TrainConfig.of(out={str(tmp_path)!r}).saving, 'now'):\n"
        "    child = os.fork()\n"
        "    if not child: print(os.getpid(), flush=True)\n"  # which has let go of the lock by now
        "    time.sleep(60)"
    )
    rank = Program([sys.executable, "-c", code], ROOT, environment())
    child = int(rank.stdout.readline())
    try:
        with pytest.raises(UsageFault, match="another run, or slim, writes there now"):
            claim(TrainConfig.of(out=str(tmp_path)))
        rank.kill()
        rank.wait()
        claim(TrainConfig.of(out=str(tmp_path)))
    finally:
        os.kill(child, signal.SIGKILL)
        rank.stdout.close()


def test_a_run_removes_what_a_killed_one_left_and_nothing_else(tmp_path):
    code = (
        "import time, torch; from train.checkpoint import files as checkpoint_files\n"
        "def save(state, file): file.write(b'half'); file.flush(); print('now', flush=True); time.sleep(60)\n"
        f"torch.save = save; checkpoint_files.write({{}}, {str(tmp_path)!r}, ['last.pt'])"
    )
    killed = Program([sys.executable, "-c", code], ROOT, environment())
    assert killed.stdout.readline() == "now\n"
    assert len(os.listdir(tmp_path)) == 1
    killed.kill()
    killed.communicate()
    for name in ("step-000003.pt.link", "other.link"):
        (tmp_path / name).touch()
    claim(TrainConfig.of(out=str(tmp_path), resume="auto"))
    checkpoint_files.write({}, str(tmp_path), ["last.pt"])
    assert sorted(os.listdir(tmp_path)) == ["last.pt", "other.link"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["last.pt", "log.jsonl"])
def test_a_named_pipe_among_the_files_of_a_run_is_refused_and_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UsageFault, match=f"{name}: is a named pipe"):
        claim(TrainConfig.of(out=str(tmp_path), resume="auto"))
    with pytest.raises(Refused, match="is not a regular file"):
        checkpoints.read(str(tmp_path / name))


@pytest.mark.parametrize("name", ["last.pt", "best.pt"])
@pytest.mark.parametrize("what", ["a folder", "a link into a folder that does not exist"])
def test_a_place_where_no_checkpoint_can_be_written_is_refused_at_the_start(tmp_path, what, name):
    if what == "a folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).symlink_to(tmp_path / "gone" / name)
    with pytest.raises(UsageFault, match=f"{name}: is {what}: no checkpoint can be written there"):
        claim(TrainConfig.of(out=str(tmp_path), resume="auto"))


@pytest.mark.parametrize("name", ["log.jsonl", "run.jsonl"])
def test_a_log_that_is_a_link_is_refused(tmp_path, name):
    (tmp_path / "precious").write_bytes(b"of another")
    (tmp_path / name).symlink_to(tmp_path / "precious")
    with pytest.raises(UsageFault, match=f"{name}: is a link, and what it leads to would be written into"):
        claim(TrainConfig.of(out=str(tmp_path), resume="auto"))
    assert (tmp_path / "precious").read_bytes() == b"of another"


# ---- attempts ------------------------------------------------------------------------------------------


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
        return error.message


STARTS: dict[str, tuple[list[tuple[int, ...]], int]] = {
    "three in a row": ([(7, 8, 9)] * 3, 9),
    "twice": ([(9,)] * 2, 0),
    "twice, then further": ([(9,), (9,), (12,)], 0),
    "further in between": ([(9,), (12,), (9,)], 0),
    "twice, then at its start, then further": ([(9,), (9,), (), (12,)], 0),
    "at others": ([(3,), (9,), (15,)], 0),
    "before the first step": ([()] * 4, 0),
    "once before the first step": ([(9,), (9,), (), (9,)], 9),
    "rank 0 a step behind the rank that fails": ([(9,), (8,), (9,)], 9),
}


@pytest.mark.covered(
    lambda what: what in ("twice", "further in between", "at others", "before the first step")
)
@pytest.mark.parametrize("what", STARTS)
def test_the_third_failure_of_a_step_in_a_row_is_the_last(tmp_path, what):
    starts, failed = STARTS[what]
    for steps in starts:
        attempt(tmp_path, *steps)
    said = f"step {failed} has failed 3 times in a row, and is not tried again" if failed else ""
    assert refused(tmp_path) == said
    if failed:
        assert refused(tmp_path) == said
    (tmp_path / FILE).unlink(missing_ok=True)
    assert refused(tmp_path) == ""


def test_a_step_that_is_taken_back_is_not_counted(tmp_path):
    for _ in range(4):
        attempt(tmp_path, 8, 9, 0)
        with pytest.raises(ZeroDivisionError), counted(str(tmp_path), CONFIG, 0) as begin:
            begin(9)
            raise ZeroDivisionError
        begin(0)  # what ended the run is known only afterwards
    assert refused(tmp_path) == ""


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
    for config in (CONFIG.changed(resume=None), CONFIG, CONFIG):
        attempt(tmp_path, 9, config=config)
    assert refused(tmp_path)
    assert refused(tmp_path, CONFIG.changed(workers=1)) == ""


def test_other_ranks_touch_no_file(tmp_path):
    attempt(tmp_path, 9, rank=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", [
    *("", "{", "[]", "null", '{"flags": 1}', '{"flags": "x", "failed": 3, "step": "y"}'),
    *("[" * 100_000, '{"a":' * 100_000, "1" * 100_000, '{"failed": [' + "9," * 10**6),
    *(f'{{"flags": FLAGS, "failed": [9, 9], "step": {step}}}' for step in ("1e400", "NaN", "true")),
])  # fmt: skip
def test_a_file_that_is_damaged_counts_nothing(tmp_path, text):
    attempt(tmp_path, 9)
    flags = json.loads((tmp_path / FILE).read_text())["flags"]
    (tmp_path / FILE).write_text(text.replace("FLAGS", json.dumps(flags)))
    assert refused(tmp_path) == ""
