"""Ranks that hang, stop, die or are told to end: who is named, when the run ends, and how it goes on."""

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
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpttool.distributed.group import Place, agree_on_attempt
from ckpttool.errors import CheckFailed, RanksDiffer
from tests.ranks import runs, trainings
from tests.ranks.forked import Program
from tests.ranks.mortal import noted
from tests.ranks.programs import ROOT, TORCHRUN, environment, own_model, start
from tests.support.run_log import entries_of, timeless
from tests.support.running import free_port
from train.config.sections import TrainConfig
from train.main import train
from train.run import run
from train.run.run import Job
from train.tasks import builtin as tasks
from train.trainer.progress import Scorer
from train.trainer.trainer import Trainer

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
@pytest.mark.parametrize(("launcher", "how", "training", "said"), [
    ("spawn", "time.sleep(999)", True, "rank 1 hangs: in 'forward' of step 3 for"),
    ("torchrun", "time.sleep(999)", False, "rank 1 hangs: in 'evaluation' of step 8 for"),
    ("spawn", "os.kill(os.getpid(), 19)", True, "rank 1 is stopped, as by SIGSTOP"),
    ("torchrun", "os.kill(os.getpid(), 19)", True, "rank 1 is stopped, as by SIGSTOP"),
], ids=["hangs", "hangs in evaluation", "stopped", "stopped under torchrun"])  # fmt: skip
def test_a_run_with_a_rank_that_hangs_ends_in_time(tmp_path, launcher, how, training, said):
    when = WHEN.format(training=training, number=3 if training else 1)
    own = own_model(tmp_path, HANGS.format(how=how), when)
    flags = ["--timeout", str(HANG_TIMEOUT), "--model", own]
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
    flags += ["--timeout", str(HANG_TIMEOUT), "--workers", "1", "--out", str(tmp_path / "x")]
    done = start([*LAUNCHERS["spawn"], *SETTINGS, *flags])
    assert done.returncode == 0, done.stderr
    slow = r"warning: rank 0: rank 1 is slow: in 'data' of step \d for \d s"
    assert re.search(slow, done.stderr), done.stderr
    assert "error" not in done.stderr


def test_an_evaluation_that_hangs_is_named_too(tmp_path):
    own = own_model(tmp_path, "time.sleep(999)", WHEN.format(training=False, number=3))
    torch.save(torch.nn.Linear(3072, 10).state_dict(), tmp_path / "in.pt")
    program = [*TORCHRUN, "2", "train/evaluate.py", str(tmp_path / "in.pt"), "--data", "fake:80"]
    flags = ["--eval-batch", "2", "--timeout", str(HANG_TIMEOUT), "--model", own]
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
    settings = ["--data", "fake:16", "--epochs", "1", "--batch-size", "4", "--timeout", "30"]
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
    settings = ["--data", "fake:16", "--batch-size", "4", "--timeout", "30", "--epochs", "2"]
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


# ---- a run that is told to end -------------------------------------------------------------------------


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
        job = Job(config, trainings.place(rank, size), data, model, tasks.build(config, data), [])
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
        assert runs.different(*runs.ends(whole, tmp_path)) == []
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
    assert (done.returncode, done.stdout, done.stderr) == (130, "starting 2 ranks …\n", "\ninterrupted\n")


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


# ---- a store within rank 0 -----------------------------------------------------------------------------

# Without torchrun, rank 0 serves the store: what it takes with it, the others must not wait for.
IN_RANK_0 = """
import os, sys, time
import torch, torch.distributed as dist
from ckpttool.distributed import group, heartbeat
from ckpttool.errors import CkptToolError

if "{where}" == "meeting" and os.environ["RANK"] == "0":
    def agree(*_):
        time.sleep(1)
        {how}
    group.agree_on_attempt = agree
try:
    with group.process_group(join_timeout=50), heartbeat.watch(100):
        dist.all_reduce(torch.ones(1))
        time.sleep(1)
        if os.environ["RANK"] == "0":
            {how}
        if "{where}" == "elsewhere":
            time.sleep(90)
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
except CkptToolError as fault:
    os.write(2, f"said {{fault}}".encode())
    os._exit(1)
"""


@pytest.mark.covered(
    lambda where, how, ranks: (ranks == 3) != (where == "elsewhere") or "_exit(1)" not in how
)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "os._exit(1)", "os._exit(0)"])
@pytest.mark.parametrize("where", ["collective", "elsewhere", "meeting"])
def test_the_end_of_rank_0_with_the_store_in_it_ends_the_others_at_once(tmp_path, where, how, ranks):
    (tmp_path / "rank.py").write_text(IN_RANK_0.format(where=where, how=how))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, str(tmp_path / "rank.py")]
    env = [environment(**shared, RANK=str(n), LOCAL_RANK=str(n), PYTHONPATH=str(ROOT)) for n in range(ranks)]
    first, *others = [Program(command, tmp_path, each) for each in env]
    first.communicate(timeout=60)
    began = time.monotonic()
    for rank, other in enumerate(others, start=1):
        _, said = other.communicate(timeout=30)
        assert other.returncode == 1
        if where == "meeting":
            assert f"said rank {rank} could not join the others: " in said
        else:
            assert f"error: rank {rank}: rank 0 is gone" in said or "said rank 0 is gone" in said
    assert time.monotonic() - began < 15
