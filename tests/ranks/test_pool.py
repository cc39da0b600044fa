"""The pool of ranks: one that raises, dies or hangs fails one test, and no other; and how forks end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest

import tests.ranks.pool as pool_of_ranks
from tests.ranks.forked import Program
from tests.ranks.pool import CaseFailed, Pool
from tests.support.running import ROOT


def add_ranks(rank: int, world_size: int, more: int) -> int:
    import torch
    import torch.distributed as dist

    total = torch.tensor([rank + more])
    dist.all_reduce(total)
    return int(total.item())


def own_pid(rank: int, world_size: int) -> int:
    return os.getpid()


def raise_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("on purpose")


def die_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)


def hang_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(60)


@pytest.fixture(scope="module")
def pool():
    pool = Pool(2)
    yield pool
    pool.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_case_runs_on_every_rank_and_its_results_come_back_in_rank_order(pool):
    assert pool.run(add_ranks, 10) == [21, 21]
    first, second = pool.run(own_pid)
    assert first != second
    assert pool.run(own_pid) == [first, second], "ranks stay alive between cases"


@pytest.mark.parametrize(("case", "said"), [
    (raise_on_one, ["rank 1 raised\nTraceback"]),
    (die_on_one, ["rank 1 died with exit code 7"]),
    (hang_on_one, ["rank 1 did not answer (the case has 1 s)", "in hang_on_one"]),
])  # fmt: skip
def test_a_rank_that_fails_is_named_and_the_next_case_gets_new_ranks(pool, case, said):
    """Of one that hangs the message shows where."""
    before = pool.run(own_pid)
    with pytest.raises(CaseFailed) as failure:
        pool.run(case, timeout=1 if case is hang_on_one else 30)
    assert [words for words in ("rank 0 returned", *said) if words not in str(failure.value)] == []
    assert not any(alive(pid) for pid in before)
    assert pool.run(add_ranks, 0) == [1, 1]


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", ["_start", "_collect"])
def test_a_start_that_was_interrupted_is_made_anew(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the ranks are there then, or all of them, which have not said that they are ready."""
    pool, rank, made = Pool(2), pool_of_ranks.Rank, list[int]()

    def one_rank(*parts: Any) -> Any:
        made.append(1)
        return interrupted() if len(made) == 2 else rank(*parts)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if step == "_start":
            patch.setattr(pool_of_ranks, "Rank", one_rank)
        else:
            patch.setattr(pool, "_collect", interrupted)
        pool.run(add_ranks, 0)
    assert len(pool.ranks) == (1 if step == "_start" else 2)
    before = [rank.process.pid for rank in pool.ranks]
    assert pool.run(add_ranks, 0) == [1, 1]
    pool.close()
    assert not any(alive(pid) for pid in before if pid)


def test_after_a_case_that_was_interrupted_its_answers_are_not_those_of_the_next(pool, monkeypatch):
    pool.run(add_ranks, 0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pool, "_collect", interrupted)
        pool.run(add_ranks, 10)
    assert pool.run(add_ranks, 0) == [1, 1]


FULL = "import sys; sys.stdout = open('/dev/full', 'w'); print('x')"
LATE = "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()"
STOPPED = "import atexit; atexit.register(print, 'exit'); print('before'); raise KeyboardInterrupt"


@pytest.mark.parametrize(
    ("code", "ends"), [(FULL, (120, "")), (LATE, (0, "late\n")), (STOPPED, (-2, "before\nexit\n"))]
)
def test_a_fork_ends_as_a_program_that_was_started_does(code: str, ends: tuple[int, str]) -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    fork = Program([sys.executable, "-c", code], ROOT, buffered)
    out, _ = fork.communicate(30)
    real = subprocess.run([sys.executable, "-c", code], env=buffered, capture_output=True, text=True)
    assert (fork.returncode, out) == (real.returncode, real.stdout) == ends
