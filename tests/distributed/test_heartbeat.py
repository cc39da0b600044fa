"""A rank that hangs, stops, dies, fails or leaves is named by the others, in real process groups."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpttool import distributed
from ckpttool.distributed import heartbeat
from ckpttool.distributed.hangs import Seen
from ckpttool.distributed.heartbeat import Pulse
from ckpttool.distributed.observer import Observer
from tests.ranks import mortal
from tests.ranks.mortal import Ended

TIMEOUT = 4.0
Case = Callable[[int, Path], object]

BAD = 1
"""The rank with which something is wrong."""

SLACK = 15.0
"""Seconds that a busy machine may be late, on top of the five seconds that are promised."""


def train(
    rank: int,
    folder: Path,
    *,
    steps: int = 6,
    at: Callable[[str, int], None] = lambda where, step: None,
    skip_backward: int = 0,
    timeout: float = TIMEOUT,
) -> None:
    """Take steps with DDP; `at` is called in each phase."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    with distributed.watch(timeout) as watched:
        for step in range(1, steps + 1):
            watched.step = step
            watched.phase("data")
            at("data", step)
            batch = torch.ones(3, 4)
            watched.phase("forward")
            at("forward", step)
            loss = ddp(batch).sum()
            if step != skip_backward:
                watched.phase("backward")
                at("backward", step)
                loss.backward()
            watched.phase("update")
            ddp.zero_grad()
            time.sleep(0.02)
        watched.phase("evaluation")
        at("evaluation", step)
        distributed.gather(None)
        watched.phase("save")
        at("save", step)
        distributed.gather(None)


def only(rank: int, folder: Path, where: str, step: int, do: Callable[[], object]) -> Any:
    """Return what `train` calls in each phase: it does something on the bad rank, in one place."""

    def at(now: str, number: int) -> None:
        if rank == BAD and (now, number) == (where, step):
            mortal.note_now(folder)
            do()

    return at


def hang() -> None:
    time.sleep(1000)


@dataclass(frozen=True)
class HangsIn:
    """A case in which the bad rank hangs."""

    phase: str
    step: int

    @property
    def __name__(self) -> str:
        return f"hangs_in_{self.phase}"

    def __call__(self, rank: int, folder: Path) -> None:
        train(rank, folder, at=only(rank, folder, self.phase, self.step, hang))


PLACES = ("data", 3), ("forward", 3), ("backward", 3), ("evaluation", 6), ("save", 6)
HANGS = [HangsIn(*place) for place in PLACES]


def stops(rank: int, folder: Path) -> None:
    train(rank, folder, at=only(rank, folder, "forward", 3, mortal.stop_oneself))


def is_killed(rank: int, folder: Path) -> None:
    train(rank, folder, at=only(rank, folder, "forward", 3, mortal.kill_oneself))


def runs_out_of_memory(rank: int, folder: Path) -> None:
    """Take memory beyond the limit of a control group; the kernel then kills the process."""

    def take() -> None:
        group = Path(memory_group(), f"ckpttool-test-{os.getpid()}")
        group.mkdir()
        (folder / "group").write_text(str(group))
        (group / "memory.limit_in_bytes").write_text(str(256 << 20))
        with contextlib.suppress(OSError):  # else it goes on in swap space, and slowly
            (group / "memory.memsw.limit_in_bytes").write_text(str(256 << 20))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        mortal.note_now(folder)
        taken = [bytearray(os.urandom(1 << 20)) for _ in range(2048)]
        assert not taken, "the limit did not hold"

    train(rank, folder, at=only(rank, folder, "forward", 3, take), timeout=3 * TIMEOUT)


def memory_group() -> str:
    """Return the folder of this process's control group for memory; skip where there is none to write in."""
    own = re.search(r"^\d+:memory:(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    for name in (own[1], "") if own else ():
        folder = f"/sys/fs/cgroup/memory{name}"
        if os.access(folder, os.W_OK):
            return folder
    pytest.skip("no control group for memory can be made here")


def raises(rank: int, folder: Path) -> None:
    def fail() -> None:
        raise ValueError("on purpose")

    train(rank, folder, at=only(rank, folder, "forward", 3, fail))


def is_told_to_end(rank: int, folder: Path) -> None:
    """End the bad rank as a signal tells it to, from another thread."""

    def end() -> None:
        heartbeat.end_as_told("SIGTERM")
        os._exit(7)

    def at(now: str, number: int) -> None:
        heartbeat.excuse((folder / f"excused-{rank}").touch)
        if (rank, now, number) == (BAD, "forward", 3):
            mortal.note_now(folder)
            threading.Thread(target=end).start()
            hang()

    train(rank, folder, at=at)


def skips_backward(rank: int, folder: Path) -> None:
    mortal.note_now(folder)
    train(rank, folder, steps=3, skip_backward=3 if rank == BAD else 0)


def has_fewer_steps(rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    with distributed.watch(TIMEOUT) as watched:
        for batch in watched.steps([torch.ones(3, 4)] * (3 if rank == BAD else 5)):
            ddp(batch).sum().backward()
    time.sleep(TIMEOUT + 5 + SLACK)


def calls_collectives_in_another_order(rank: int, folder: Path) -> None:
    with distributed.watch(TIMEOUT) as watched:
        watched.phase("forward")
        mortal.note_now(folder)
        group = torch.distributed.new_group([0, 1])
        torch.distributed.barrier(group if rank == BAD else None)
        hang()


def holds_the_interpreter(rank: int, folder: Path) -> None:
    train(rank, folder, at=only(rank, folder, "forward", 3, lambda: re.match(r"(a+)+$", "a" * 60 + "b")))


def is_slow(rank: int, folder: Path) -> None:
    def come_late() -> None:
        """Wait for the warning, which comes after half of the timeout, or later on a busy machine."""
        end = time.monotonic() + 2.7 * TIMEOUT
        while "is slow" not in (folder / "0.log").read_text() and time.monotonic() < end:
            time.sleep(0.1)

    train(rank, folder, steps=80, at=only(rank, folder, "data", 3, come_late), timeout=3 * TIMEOUT)


def computes_long(rank: int, folder: Path) -> None:
    def compute() -> None:
        end = time.monotonic() + 2.5 * TIMEOUT
        while time.monotonic() < end:
            torch.ones(100, 100) @ torch.ones(100, 100)

    train(rank, folder, at=only(rank, folder, "save", 6, compute))


def compiles_long(rank: int, folder: Path) -> None:
    """The work is done by another process, as torch.compile's is."""
    code = f"import time; e = time.time() + {2.5 * TIMEOUT}\nwhile time.time() < e: pass"
    train(
        rank,
        folder,
        at=only(rank, folder, "forward", 1, lambda: subprocess.run([sys.executable, "-c", code])),
    )


def writes_long(rank: int, folder: Path) -> None:
    def write() -> None:
        with open("/dev/null", "wb") as file:
            for _ in range(int(10 * TIMEOUT * 2.5)):
                file.write(bytes(100_000))
                time.sleep(0.1)

    train(rank, folder, at=only(rank, folder, "save", 6, write))


def evaluates_long(rank: int, folder: Path) -> None:
    def evaluate() -> None:
        for _ in range(10):
            time.sleep(TIMEOUT / 4)
            heartbeat.progress()

    train(rank, folder, at=only(rank, folder, "evaluation", 6, evaluate))


def sleeps_as_a_whole(rank: int, folder: Path) -> None:
    """Stop all ranks at once for longer than the timeout, as a machine that sleeps does."""
    own = os.getpid()

    def at(now: str, number: int) -> None:
        if (now, number) == ("forward", 3):
            subprocess.Popen(["sh", "-c", f"kill -STOP {own}; sleep {1.5 * TIMEOUT}; kill -CONT {own}"])
            time.sleep(2)

    train(rank, folder, at=at)


CASES: list[Case] = [
    *HANGS,
    *(stops, is_killed, runs_out_of_memory, raises, is_told_to_end, skips_backward, has_fewer_steps),
    *(calls_collectives_in_another_order, holds_the_interpreter),
    *(is_slow, computes_long, compiles_long, writes_long, evaluates_long, sleeps_as_a_whole),
]


class Cases:
    """The cases of this file, run seven at a time, as most of what they do is to wait."""

    def __init__(self, threads: ThreadPoolExecutor, folder: Path) -> None:
        self.folder = folder
        self.begun = {
            (case, size): threads.submit(mortal.run, case, self.folder_of(case, size), size, patience=60)
            for case, size in [*((case, 2) for case in CASES), (HANGS[0], 3)]
        }

    def folder_of(self, case: Case, size: int = 2) -> Path:
        """Return where a case writes."""
        folder = self.folder / f"{case.__name__}-{size}"
        folder.mkdir(exist_ok=True)
        return folder

    def ends(self, case: Case, size: int = 2) -> list[Ended]:
        """Return how the ranks of a case have ended."""
        return self.begun[case, size].result()

    def in_time(self, case: Case, size: int = 2) -> list[Ended]:
        """Return how the ranks have ended, which they had to do in time, and by themselves."""
        ends = self.ends(case, size)
        assert None not in [end.code for end in ends], [end.said for end in ends]
        late = max(end.at for end in ends) - mortal.noted(self.folder_of(case, size))
        assert late < TIMEOUT + 5 + SLACK, f"{late:.1f} s"
        return ends


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cases]:
    threads = ThreadPoolExecutor(7)
    yield Cases(threads, tmp_path_factory.mktemp("cases"))
    threads.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", HANGS, ids=lambda case: case.phase)
def test_a_rank_that_hangs_is_named_by_all_with_its_phase_and_its_stack(cases: Cases, case: HangsIn) -> None:
    where = f"'{case.phase}' of step {case.step}"
    for rank, end in enumerate(cases.in_time(case)):
        assert end.code == 1, end.said
        assert re.search(rf"error: rank {rank}: rank 1 hangs: in {where} for \d+ s ", end.said), end.said
        assert "stack of rank 1" in end.said and "time.sleep(1000)" in end.said
        assert "waiting for it: rank 0 in" in end.said


def test_all_of_three_ranks_say_the_same(cases: Cases) -> None:
    said = [end.said.partition("error: ")[2].partition(": ")[2] for end in cases.in_time(HANGS[0], 3)]
    assert said[0].startswith("rank 1 hangs")
    assert "ranks 0, 2 in 'backward' of step 3" in said[0]
    assert said[0] == said[1] == said[2]


def test_a_stopped_rank_is_told_from_one_that_hangs_and_ends_too(cases: Cases) -> None:
    ends = cases.in_time(stops)
    assert [end.code for end in ends] == [1, 1]
    assert "error: rank 0: rank 1 is stopped, as by SIGSTOP (process " in ends[0].said
    assert re.search(r"no heartbeat for \d+ s; the last one said '", ends[0].said)
    own = "error: rank 1: this rank was stopped, as by SIGSTOP, and the others have ended the job (exit 1)\n"
    assert ends[BAD].said == own


def test_a_killed_rank_is_named_at_once(cases: Cases) -> None:
    ends = cases.in_time(is_killed)
    assert ends[0].at - mortal.noted(cases.folder_of(is_killed)) < TIMEOUT
    assert ends[BAD].code == -signal.SIGKILL
    assert "error: rank 0: rank 1 is gone: process " in ends[0].said
    assert "exited without reporting, probably killed" in ends[0].said
    assert "memory ran out" not in ends[0].said


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_a_rank_that_was_killed_as_memory_ran_out_is_told_from_one_that_was_killed(cases: Cases) -> None:
    memory_group()
    ends = cases.in_time(runs_out_of_memory)
    with contextlib.suppress(OSError):
        Path((cases.folder_of(runs_out_of_memory) / "group").read_text()).rmdir()
    assert ends[BAD].code == -signal.SIGKILL, ends[BAD].said
    assert "rank 1 is gone: process " in ends[0].said
    assert "the kernel killed a process on this machine, as memory ran out" in ends[0].said


def test_a_rank_that_raises_is_named_with_its_error(cases: Cases) -> None:
    ends = cases.in_time(raises)
    assert "rank 0: rank 1 failed in 'forward' of step 3: ValueError: on purpose" in ends[0].said
    assert "Traceback" in ends[BAD].said and "failed in" not in ends[BAD].said


def test_a_rank_that_was_told_to_end_is_named_and_excuses_the_others(cases: Cases) -> None:
    ends = cases.in_time(is_told_to_end)
    said = "error: rank 0: rank 1 was ended by SIGTERM in 'forward' of step 3\n"
    assert ends[0].said.startswith(said) and (ends[BAD].code, ends[BAD].said) == (7, "")
    assert [path.name for path in cases.folder_of(is_told_to_end).glob("excused-*")] == ["excused-0"]


def test_a_rank_that_skips_backward_is_named(cases: Cases) -> None:
    ends = cases.in_time(skips_backward)
    said = "rank 1 skipped backward: it has begun 3 forward and 2 backward passes"
    assert said in ends[0].said, ends[0].said


def test_a_rank_with_fewer_steps_is_named(cases: Cases) -> None:
    end = cases.ends(has_fewer_steps)[0]
    assert end.code == 1
    assert "rank 1 has ended its loop after step 3: it had fewer steps than the others" in end.said


def test_ranks_that_wait_in_different_collectives_are_a_deadlock(cases: Cases) -> None:
    for end in cases.in_time(calls_collectives_in_another_order):
        assert "no rank makes progress, and none is behind: all are in 'forward'" in end.said


def test_a_rank_whose_interpreter_is_held_is_named_with_its_stack(cases: Cases) -> None:
    end = cases.in_time(holds_the_interpreter)[0]
    assert "rank 1 does not answer" in end.said and "something holds its interpreter" in end.said
    assert "in holds_the_interpreter" in end.said or "in <lambda>" in end.said


@pytest.mark.parametrize("case", CASES[-6:])
def test_a_rank_that_works_or_is_slow_is_not_ended(cases: Cases, case: Any) -> None:
    ends = cases.ends(case)
    assert [end.code for end in ends] == [0, 0], [end.said for end in ends]
    assert "error" not in ends[0].said + ends[1].said


def test_a_slow_loader_is_named_in_a_warning_and_its_end_too(cases: Cases) -> None:
    said = cases.ends(is_slow)[0].said
    assert re.search(r"^warning: rank 0: rank 1 is slow: in 'data' of step 3 for \d+ s", said), said
    assert "counts as hung once it has done nothing for 12 s" in said
    assert said.endswith("warning: rank 0: rank 1 has continued\n")


STARVED = """
import os, subprocess, sys, time
from ckpttool.distributed import processes

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])
before, end = processes.work()[0], time.monotonic() + 1
while time.monotonic() < end:
    pass
print(processes.work()[0] - before)
rival.kill()
rival.wait()
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count that")
def test_a_rank_that_waits_for_a_processor_works() -> None:
    done = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 0.8


def test_one_rank_is_not_watched_and_no_thread_is_left() -> None:
    before = threading.active_count()
    with distributed.watch(0.1) as watched:
        assert list(watched.steps("ab")) == ["a", "b"]
        assert (watched.step, watched.doing, threading.active_count()) == (2, "step", before)
        time.sleep(0.3)


def leaves_nothing(rank: int, size: int) -> tuple[int, int, int]:
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with distributed.watch(5):
        during = threading.active_count()
    assert heartbeat._pulse is None
    return (
        during - before[0],
        threading.active_count() - before[0],
        len(os.listdir("/proc/self/fd")) - before[1],
    )


def ends_while_a_thread_sleeps(rank: int, size: int) -> tuple[int, int, bool]:
    """Leave a watch whose thread is in the middle of a beat, and then finds a verdict that ends processes.

    Returns:
        The threads and descriptors that were left, and whether a file that was opened then is whole.
    """
    before, look, seen = len(os.listdir("/proc/self/fd")), Observer.look, Pulse.seen
    late, go_on = threading.Event(), threading.Event()

    def look_late(own: Observer) -> None:
        late.set()
        go_on.wait(30)
        look(own)

    def find_a_verdict(pulse: Pulse) -> list[Seen]:
        pulse.verdict = '{"kind": "hangs", "ranks": [0], "lines": ["too late"]}'
        return seen(pulse)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Observer, "look", look_late)
        patch.setattr(Pulse, "seen", find_a_verdict)
        with distributed.watch(5):
            late.wait(30)
        threads = [one for one in threading.enumerate() if one.name.endswith("(_judge)")]
        file = os.memfd_create("of another")
        os.write(file, b"whole")
        go_on.set()
        for thread in threads:
            thread.join(30)
    whole = os.pread(file, 9, 0) == b"whole"
    os.close(file)
    return len(threads), len(os.listdir("/proc/self/fd")) - before, whole


def test_a_thread_that_is_late_ends_no_process_and_touches_no_other_file(run_ranks: Any) -> None:
    """The descriptor of the stack stays open, as another file would get its number."""
    assert run_ranks(2, ends_while_a_thread_sleeps) == [(1, 1, True)] * 2


def test_the_threads_end_with_the_block(run_ranks: Any) -> None:
    assert run_ranks(2, leaves_nothing) == [(2, 0, 0)] * 2
