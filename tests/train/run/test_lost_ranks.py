"""Ranks that hang, stop or die: who is named, when the run ends, and how it goes on when started again."""

from __future__ import annotations

import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpttool.distributed.group import Place, agree_on_attempt
from ckpttool.errors import CheckFailed, RanksDiffer
from tests.ranks.mortal import noted
from tests.ranks.programs import TORCHRUN, own_model, start

# ---- ranks that hang, stop, or wait long --------------------------------------------------------------

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
    torch.save(torch.nn.Linear(3072, 10).state_dict(), tmp_path / "in.pt")
    program = [*TORCHRUN, "2", "train/evaluate.py", str(tmp_path / "in.pt"), "--data", "fake:80"]
    flags = ["--eval-batch", "2", "--hang-timeout", str(HANG_TIMEOUT), "--model", own]
    done = start([*program, *flags])
    assert "error: rank 0: rank 1 hangs: in 'evaluation' for" in done.stderr, done.stderr


# ---- ranks that are started again ----------------------------------------------------------------------

DIES = """
number = len(list(marks.glob("killed-*")))
if number < 2 and int(rank) == number:
    (marks / f"killed-{number}").touch()
    os.kill(os.getpid(), 9)
"""


@pytest.mark.timeout(180)
def test_a_run_survives_ranks_that_are_killed_under_max_restarts(tmp_path):
    """Each rank is killed once. Before, four kills of ten left both new ranks waiting for dead ones."""
    own = own_model(tmp_path, DIES.strip())
    launcher = [*TORCHRUN, "2", "--max-restarts", "2"]
    settings = ["--data", "fake:16", "--epochs", "1", "--batch-size", "4", "--timeout", "15"]
    model = ["--model", own, "--out", str(tmp_path / "run"), "--resume"]
    done = start([*launcher, "train/main.py", *settings, *model])
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list(tmp_path.glob("killed-*"))) == 2
    state = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    assert state["progress"]["samples"] == 16


# ---- agreement -----------------------------------------------------------------------------------------


def agree(
    store: Any, ranks: list[int], size: int, timeout: float = 20.0, kinds: str = "gloo " * 4
) -> list[Any]:
    """Return what each of these ranks agrees on, or its error; each is a thread with its own connection."""

    def one(rank: int) -> Any:
        own = dist.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=20))
        try:
            return agree_on_attempt(own, Place(rank, size, kinds.split()[rank], torch.device("cpu")), timeout)
        except (CheckFailed, RanksDiffer) as error:
            return error.message

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(one, ranks))


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_all_ranks_of_an_attempt_agree_however_many_and_no_two_attempts_have_one_name(store):
    every = ([2, 0, 1], [1, 2, 0], [0, 3, 2, 1], [1, 0], [0])
    attempts = [agree(store, ranks, len(ranks)) for ranks in every]
    assert all(len(set(names)) == 1 for names in attempts)
    assert len({names[0] for names in attempts}) == 5


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_does_not_agree_with_the_dead_of_an_earlier_attempt(store, missing):
    agree(store, [0, 1], 2)
    (said,) = agree(store, [1 - missing], 2, timeout=0.5)
    assert said == f"rank {1 - missing}: rank {missing} has not joined within 0.5 s"
    one, other = agree(store, [0, 1], 2)
    assert one == other


def test_ranks_that_died_while_they_met_are_replaced(store):
    """Rank 2 has written its number and died; rank 0 lists it until the new rank 2 comes."""
    store.set("ckpttool/rank/2", "dead")
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(agree, store, [0, 1], 3)
        while not store.check(["ckpttool/ranks"]):
            pass
        assert json.loads(store.get("ckpttool/ranks"))[2] == "dead"
        (last,) = agree(store, [2], 3)
    assert waiting.result() == [last, last]


def test_ranks_whose_backends_differ_are_told_so_on_every_rank(store):
    said = agree(store, [0, 1, 2], 3, kinds="nccl nccl gloo")
    assert said == ["ranks can't meet: the backend is nccl on rank 0, and gloo on rank 2"] * 3


# ---- a step that fails again and again ---------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_step_that_has_failed_three_times_is_not_tried_again(tmp_path):
    own = own_model(tmp_path, "os.kill(os.getpid(), 9)", WHEN.format(training=True, number=2))
    settings = ["--data", "fake:16", "--batch-size", "4", "--timeout", "15", "--epochs", "2"]
    model = ["--model", own, "--out", str(tmp_path / "run"), "--resume"]
    done = start([*TORCHRUN, "2", "--max-restarts", "3", "train/main.py", *settings, *model], patience=280)
    assert done.returncode == 1
    refused = "error: step 2 has failed 3 times in a row, and is not tried again (the output of those"
    assert done.stderr.count(refused) == 1


# ---- a short drill: runs that are killed at seeded moments; `make drill` has all kinds of kills ----------

SHORT = ["rank 0, in the middle of a save", "the agent, by SIGTERM in evaluation"]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_runs_that_are_killed_end_in_the_bits_of_one_that_nothing_disturbed():
    kinds = [word for name in SHORT for word in ("--only", name)]
    done = start([sys.executable, "-m", "tests.drill", "--kills", "2", "--load", "0", *kinds], patience=380)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^2 of 2 held", done.stdout, re.MULTILINE)
    assert [line.partition("  ")[0] for line in done.stdout.splitlines()[1:3]] == SHORT


def test_an_unknown_kind_is_refused_with_the_names_of_all():
    done = start([sys.executable, "-m", "tests.drill", "--only", "nothing"])
    assert done.returncode == 2
    assert "no such kind" in done.stderr and "all at once, in a step" in done.stderr
