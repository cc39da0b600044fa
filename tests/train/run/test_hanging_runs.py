"""Runs of the trainer in which a rank hangs, stops, or waits long: who is named, and when it ends."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from tests.ranks.mortal import noted
from tests.ranks.programs import TORCHRUN, own_model, start

HANG_TIMEOUT = 4
SLACK = 8.0
"""Seconds that the launcher and a busy machine may take, beside the five seconds that are promised."""

WHEN = "rank == '1' and self.training == {training} and next(passes) == {number}"
HANGS = "(marks / 'when').write_text(str(time.time()))\n{how}"

DATA = """
import os, time
from pathlib import Path
import torch
from torch.utils.data import Dataset, get_worker_info

class Samples(Dataset):
    classes = list("ab")
    def __len__(self):
        return 16
    def __getitem__(self, index):
        if torch.distributed.is_initialized() and os.environ["RANK"] == "1" and index % 8 == 3:
            mark = Path(__file__).with_name("when")
            if not mark.exists():
                mark.write_text(str(time.time()))
                {how}
        return torch.rand(3072), index % 2

def data():
    return Samples(), Samples()

model = lambda: torch.nn.Linear(3072, 2)
"""


def own_data(folder: Path, how: str) -> list[str]:
    """Write a user's samples of which one does something, and return the flags."""
    (folder / "own.py").write_text(DATA.format(how=how))
    return ["--data", f"{folder}/own.py:data", "--model", f"{folder}/own.py:model"]


LAUNCHERS = {
    "spawn": [sys.executable, "train/main.py", "--spawn", "2"],
    "torchrun": [*TORCHRUN, "2", "train/main.py"],
}
SETTINGS = ["--data", "fake:32", "--epochs", "1", "--batch-size", "4", "--eval-batch", "2"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "how", "training", "said"),
    [
        ("spawn", "time.sleep(999)", True, "rank 1 hangs: in 'forward' of step 3 for"),
        ("torchrun", "time.sleep(999)", False, "rank 1 hangs: in 'evaluation' of step 8 for"),
        ("spawn", "os.kill(os.getpid(), 19)", True, "rank 1 is stopped, as by SIGSTOP"),
        ("torchrun", "os.kill(os.getpid(), 19)", True, "rank 1 is stopped, as by SIGSTOP"),
    ],
    ids=["hangs", "hangs in evaluation", "stopped", "stopped under torchrun"],
)
def test_a_run_with_a_rank_that_hangs_ends_in_time(tmp_path, launcher, how, training, said):
    when = WHEN.format(training=training, number=3 if training else 1)
    own = own_model(tmp_path, HANGS.format(how=how), when)
    flags = ["--hang-timeout", str(HANG_TIMEOUT), "--model", own]
    done = start([*LAUNCHERS[launcher], *SETTINGS, *flags, "--out", str(tmp_path / "x")])
    took = time.time() - noted(tmp_path)
    assert done.returncode == 1, done.stderr
    for rank in (0, 1) if "hangs" in said else (0,):
        assert f"error: rank {rank}: {said}" in done.stderr, done.stderr
    assert took < HANG_TIMEOUT + 5 + SLACK


def test_a_dead_process_that_loads_data_is_told_from_a_dead_rank(tmp_path):
    kill = "os.kill(os.getpid(), 9) if get_worker_info() else mark.unlink()"
    flags = own_data(tmp_path, kill)
    done = start([*LAUNCHERS["spawn"], *SETTINGS, *flags, "--workers", "1", "--out", str(tmp_path / "x")])
    assert done.returncode == 1
    named = r"error: rank 1: a process that loads data (is killed by signal|has died|exited unexpectedly)"
    assert re.search(named, done.stderr)
    assert "is gone" not in done.stderr


@pytest.mark.long
def test_a_slow_loader_is_warned_of_and_the_run_ends_well(tmp_path):
    flags = own_data(tmp_path, "time.sleep(3)")
    flags += ["--hang-timeout", str(HANG_TIMEOUT), "--workers", "1", "--out", str(tmp_path / "x")]
    done = start([*LAUNCHERS["spawn"], *SETTINGS, *flags])
    assert done.returncode == 0, done.stderr
    slow = r"warning: rank 0: rank 1 is slow: in 'data' of step \d for \d s"
    assert re.search(slow, done.stderr), done.stderr
    assert "error" not in done.stderr


def test_an_evaluation_that_hangs_is_named_too(tmp_path):
    own = own_model(tmp_path, "time.sleep(999)", WHEN.format(training=False, number=3))
    import torch

    torch.save(torch.nn.Linear(3072, 10).state_dict(), tmp_path / "in.pt")
    program = [*TORCHRUN, "2", "train/evaluate.py", str(tmp_path / "in.pt"), "--data", "fake:80"]
    flags = ["--eval-batch", "2", "--hang-timeout", str(HANG_TIMEOUT), "--model", own]
    done = start([*program, *flags])
    assert "error: rank 0: rank 1 hangs: in 'evaluation' for" in done.stderr, done.stderr
