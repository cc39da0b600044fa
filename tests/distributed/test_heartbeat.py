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
from functools import partial
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

BAD = 1
"""The rank with which something is wrong."""

SLACK = 15.0
"""Seconds that a busy machine may be late, on top of the five seconds that are promised."""


def train(
    rank: int,
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

        def begin(phase: str) -> None:
            watched.phase(phase)
            at(phase, step)

        for step in range(1, steps + 1):
            watched.step = step
            begin("data")
            batch = torch.ones(3, 4)
            begin("forward")
            loss = ddp(batch).sum()
            if step != skip_backward:
                begin("backward")
                loss.backward()
            watched.phase("update")
            ddp.zero_grad()
            time.sleep(0.02)
        for phase in ("evaluation", "save"):
            begin(phase)
            distributed.gather(None)


@dataclass(frozen=True)
class On:
    """A case in which the bad rank does something in one place of its training; it is told the folder."""

    does: Callable[[Path], object]
    phase: str = "forward"
    step: int = 3
    steps: int = 6
    timeout: float = TIMEOUT

    def __call__(self, rank: int, folder: Path) -> None:
        def at(now: str, number: int) -> None:
            if (rank, now, number) == (BAD, self.phase, self.step):
                mortal.note_now(folder)
                self.does(folder)

        train(rank, at=at, steps=self.steps, timeout=self.timeout)


def hang(folder: Path) -> None:
    time.sleep(1000)


def send_oneself(number: int, folder: Path) -> None:
    os.kill(os.getpid(), number)


def run_out_of_memory(folder: Path) -> None:
    """Take memory beyond the limit of a control group; the kernel then kills the process."""
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


def memory_group() -> str:
    """Return the folder of this process's control group for memory; skip where there is none to write in."""
    own = re.search(r"^\d+:memory:(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    for name in (own[1], "") if own else ():
        folder = f"/sys/fs/cgroup/memory{name}"
        if os.access(folder, os.W_OK):
            return folder
    pytest.skip("no control group for memory can be made here")


def fail(folder: Path) -> None:
    raise ValueError("on purpose")


def hold_the_interpreter(folder: Path) -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


def is_slow(rank: int, folder: Path) -> None:
    """Wait in the data of one step for the warning, and take later steps slowly until its end is said too.

    A busy machine says both late.
    """

    def says(text: str) -> bool:
        return text in (folder / "0.log").read_text()

    def at(phase: str, step: int) -> None:
        if rank != BAD or phase != "data":
            return
        end = time.monotonic() + 2.7 * TIMEOUT
        while step == 3 and not says("is slow") and time.monotonic() < end:
            time.sleep(0.1)
        if step > 3 and not says("has continued"):
            time.sleep(0.3)

    train(rank, at=at, steps=80, timeout=3 * TIMEOUT)


LONG = 2.5 * TIMEOUT
"""Seconds of work, after which a rank that did nothing would have been ended long ago."""


REST = 0.06
"""Seconds of sleep after 0.02 of work: a fourth of a core is five times what counts as work."""


def compute(folder: Path) -> None:
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        began = time.process_time()
        while time.process_time() < began + 0.02:
            torch.ones(100, 100) @ torch.ones(100, 100)
        time.sleep(REST)


def compile_in_another_process(folder: Path) -> None:
    """Have the work done as torch.compile does."""
    code = f"import time\nend = time.time() + {LONG}\nwhile time.time() < end:\n"
    code += (
        f" began = time.process_time()\n while time.process_time() < began + 0.02: pass\n time.sleep({REST})"
    )
    subprocess.run([sys.executable, "-c", code])


def write(folder: Path) -> None:
    with open("/dev/null", "wb") as file:
        for _ in range(int(10 * LONG)):
            file.write(bytes(100_000))
            time.sleep(0.1)


def evaluate(folder: Path) -> None:
    for _ in range(10):
        time.sleep(TIMEOUT / 4)
        heartbeat.progress()


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
            hang(folder)

    train(rank, at=at)


def skips_backward(rank: int, folder: Path) -> None:
    mortal.note_now(folder)
    train(rank, steps=3, skip_backward=3 if rank == BAD else 0)


def has_fewer_steps(rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    mortal.note_now(folder)
    with distributed.watch(TIMEOUT) as watched:
        for batch in watched.steps([torch.ones(3, 4)] * (3 if rank == BAD else 5)):
            ddp(batch).sum().backward()
    end = time.monotonic() + TIMEOUT + 5 + SLACK
    while "error" not in (folder / "0.log").read_text() and time.monotonic() < end:
        time.sleep(0.1)


def calls_collectives_in_another_order(rank: int, folder: Path) -> None:
    with distributed.watch(TIMEOUT) as watched:
        watched.phase("forward")
        mortal.note_now(folder)
        group = torch.distributed.new_group([0, 1])
        torch.distributed.barrier(group if rank == BAD else None)
        hang(folder)


def sleeps_as_a_whole(rank: int, folder: Path) -> None:
    """Stop all ranks at once for longer than the timeout, as a machine that sleeps does."""
    own = os.getpid()

    def at(now: str, number: int) -> None:
        if (now, number) == ("forward", 3):
            subprocess.Popen(["sh", "-c", f"kill -STOP {own}; sleep {1.5 * TIMEOUT}; kill -CONT {own}"])
            time.sleep(2)

    train(rank, at=at)


PLACES = {"data": 3, "forward": 3, "backward": 3, "evaluation": 6, "save": 6}
"""By phase, in which step a rank hangs."""

WORKS: dict[str, Callable[[int, Path], object]] = {
    "is slow": is_slow,
    "computes": On(compute, "save", 6),
    "compiles": On(compile_in_another_process, "forward", 1),
    "writes": On(write, "save", 6),
    "evaluates": On(evaluate, "evaluation", 6),
    "sleeps as a whole": sleeps_as_a_whole,
}
CASES: dict[str, Callable[[int, Path], object]] = {
    **{phase: On(hang, phase, step) for phase, step in PLACES.items()},
    "of three": On(hang, "data"),
    "is stopped": On(partial(send_oneself, signal.SIGSTOP)),
    "is killed": On(partial(send_oneself, signal.SIGKILL), timeout=10 * TIMEOUT),
    "runs out of memory": On(run_out_of_memory, timeout=3 * TIMEOUT),
    "raises": On(fail),
    "is told to end": is_told_to_end,
    "skips backward": skips_backward,
    "has fewer steps": has_fewer_steps,
    "another order": calls_collectives_in_another_order,
    "holds the interpreter": On(hold_the_interpreter),
    **WORKS,
}


class Cases:
    """The cases of this file, run four at a time for each core, as most of what they do is to wait."""

    def __init__(self, threads: ThreadPoolExecutor, folder: Path) -> None:
        self.folder, self.begun = folder, {}
        for name, case in CASES.items():
            (folder / name).mkdir()
            size = 3 if name == "of three" else 2
            self.begun[name] = threads.submit(mortal.run, case, folder / name, size, patience=60)

    def ends(self, name: str) -> list[Ended]:
        """Return how the ranks of a case have ended."""
        return self.begun[name].result()

    def in_time(self, name: str) -> list[Ended]:
        """Return how the ranks have ended, which they had to do in time, and by themselves."""
        ends = self.ends(name)
        assert None not in [end.code for end in ends], [end.said for end in ends]
        late = max(end.at for end in ends) - mortal.noted(self.folder / name)
        assert late < TIMEOUT + 5 + SLACK, f"{late:.1f} s"
        return ends


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cases]:
    threads = ThreadPoolExecutor(4 * len(os.sched_getaffinity(0)))
    yield Cases(threads, tmp_path_factory.mktemp("cases"))
    threads.shutdown(cancel_futures=True)


@pytest.mark.parametrize("phase", PLACES)
def test_a_rank_that_hangs_is_named_by_all_with_its_phase_and_its_stack(cases: Cases, phase: str) -> None:
    where = f"'{phase}' of step {PLACES[phase]}"
    for rank, end in enumerate(cases.in_time(phase)):
        assert end.code == 1, end.said
        assert re.search(rf"error: rank {rank}: rank 1 hangs: in {where} for \d+ s ", end.said), end.said
        assert "stack of rank 1" in end.said and "time.sleep(1000)" in end.said
        assert "waiting for it: rank 0 in" in end.said


def test_all_of_three_ranks_say_the_same(cases: Cases) -> None:
    said = [end.said.partition("error: ")[2].partition(": ")[2] for end in cases.in_time("of three")]
    assert said[0].startswith("rank 1 hangs")
    assert "ranks 0, 2 in 'backward' of step 3" in said[0]
    assert said[0] == said[1] == said[2]


def test_a_stopped_rank_is_told_from_one_that_hangs_and_ends_too(cases: Cases) -> None:
    ends = cases.in_time("is stopped")
    assert [end.code for end in ends] == [1, 1]
    assert "error: rank 0: rank 1 is stopped, as by SIGSTOP (process " in ends[0].said
    assert re.search(r"no heartbeat for \d+ s; the last one said '", ends[0].said)
    own = "error: rank 1: this rank was stopped, as by SIGSTOP, and the others have ended the job (exit 1)\n"
    assert ends[BAD].said == own


def test_a_killed_rank_is_named_at_once(cases: Cases) -> None:
    """`in_time` allows less than the timeout of this case, which thus has no part in it."""
    ends = cases.in_time("is killed")
    assert ends[BAD].code == -signal.SIGKILL
    assert "error: rank 0: rank 1 is gone: process " in ends[0].said
    assert "exited without reporting, probably killed" in ends[0].said
    assert "memory ran out" not in ends[0].said


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_a_rank_that_was_killed_as_memory_ran_out_is_told_from_one_that_was_killed(cases: Cases) -> None:
    memory_group()
    ends = cases.in_time("runs out of memory")
    with contextlib.suppress(OSError):
        Path((cases.folder / "runs out of memory" / "group").read_text()).rmdir()
    assert ends[BAD].code == -signal.SIGKILL, ends[BAD].said
    assert "rank 1 is gone: process " in ends[0].said
    assert "the kernel killed a process on this machine, as memory ran out" in ends[0].said


def test_a_rank_that_was_told_to_end_is_named_and_excuses_the_others(cases: Cases) -> None:
    ends = cases.in_time("is told to end")
    said = "error: rank 0: rank 1 was ended by SIGTERM in 'forward' of step 3\n"
    assert ends[0].said.startswith(said) and (ends[BAD].code, ends[BAD].said) == (7, "")
    excused = (cases.folder / "is told to end").glob("excused-*")
    assert [path.name for path in excused] == ["excused-0"]


@pytest.mark.covered(lambda name, said: name == "has fewer steps")
@pytest.mark.parametrize(("name", "said"), {
    "skips backward": "rank 1 skipped backward: it has begun 3 forward and 2 backward passes",
    "has fewer steps": "rank 1 has ended its loop after step 3: it had fewer steps than the others",
    "raises": "rank 0: rank 1 failed in 'forward' of step 3: ValueError: on purpose",
    "another order": "no rank makes progress, and none is behind: all are in 'forward'",
    "holds the interpreter": "1 does not answer.*something holds its interpreter.*in hold_the_interpreter",
}.items())  # fmt: skip
def test_a_rank_that_does_something_else_is_named_with_it(cases: Cases, name: str, said: str) -> None:
    end, bad = cases.in_time(name)
    assert end.code == 1
    assert re.search(said, end.said, re.DOTALL), end.said
    if name == "raises":
        assert "Traceback" in bad.said and "failed in" not in bad.said
    if name == "another order":
        assert said in bad.said


@pytest.mark.parametrize("name", WORKS)
def test_a_rank_that_works_or_is_slow_is_not_ended(cases: Cases, name: str) -> None:
    ends = cases.ends(name)
    assert [end.code for end in ends] == [0, 0], [end.said for end in ends]
    assert "error" not in ends[0].said + ends[1].said


def test_a_slow_loader_is_named_in_a_warning_and_its_end_too(cases: Cases) -> None:
    said = cases.ends("is slow")[0].said
    assert re.search(r"^warning: rank 0: rank 1 is slow: in 'data' of step 3 for \d+ s", said), said
    assert "counts as hung once it has done nothing for 12 s" in said
    assert said.endswith("warning: rank 0: rank 1 has continued\n")


STARVED = """
import os, subprocess, sys, time
from ckpttool.distributed import observer

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])
before, end = observer.work_done()[0], time.monotonic() + 1
while time.monotonic() < end:
    pass
print(observer.work_done()[0] - before)
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
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with distributed.watch(5):
        during = threading.active_count()
    assert heartbeat._pulse is None
    return during - threads, threading.active_count() - threads, len(os.listdir("/proc/self/fd")) - files


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
