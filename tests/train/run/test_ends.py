"""The ways in which a run ends: success, refusal, failure, interruption; and its limits."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first DDP would import it inside a process group, which it then keeps
import torch.distributed as dist

from ckpttool.distributed import collectives
from ckpttool.distributed.collectives import RankFailed
from ckpttool.distributed.group import process_group
from ckpttool.errors import CkptToolError, RanksDiffer
from tests.ranks import trainings
from tests.ranks.forked import Program
from tests.ranks.programs import PATIENCE, ROOT, TINY, TORCHRUN, environment, own_model, start
from train import main
from train.config import command_line
from train.config.flags import Every
from train.config.sections import TrainConfig, TrainingConfig
from train.launch import program as launch
from train.model.updater import total_steps
from train.run import report
from train.run.run import Due, Job, Limits
from train.trainer.progress import Progress
from train.trainer.trainer import Trainer

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="this is known of processes on Linux")


@pytest.mark.parametrize(("command", "said", "code"), [
    (["train/main.py", "--data", "fake:0", "--out", "{}/x"], "error: --data fake:0", 2),
    (["train/evaluate.py", "/nowhere.pt", "--model", "simple-cnn"], "nowhere.pt: no such file", 3),
], ids=["refused flags", "missing checkpoint"])  # fmt: skip
def test_under_torchrun_a_refusal_is_one_line_from_rank_0(tmp_path, command, said, code):
    done = start([*TORCHRUN, "2", *(word.format(tmp_path) for word in command)])
    assert done.returncode == 1  # torchrun's own
    assert done.stderr.count(said) == done.stderr.count("error: ") == 2  # once below torchrun's own lines
    assert f"exitcode  : {code}" in done.stderr
    assert not (tmp_path / "x").exists()


def test_spawn_returns_the_ranks_exit_code_and_their_one_line(tmp_path):
    (tmp_path / "last.pt").touch()
    done = start([sys.executable, "train/main.py", "--spawn", "2", *TINY, "--out", str(tmp_path)])
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path}: already holds a run")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("how", "code", "said"), [
    ("raise ValueError('on purpose')", 1, "ValueError: on purpose"),
    ("os.kill(os.getpid(), 9)", 137, "error: rank 1 was killed by SIGKILL\n"),
], ids=["raises", "killed"])  # fmt: skip
def test_a_rank_that_fails_ends_the_others_and_only_it_has_a_traceback(tmp_path, how, code, said):
    own = own_model(tmp_path, how, "torch.is_grad_enabled() and rank == '1'")
    model = ["--model", own, "--out", str(tmp_path / "x")]
    assert TrainConfig().ranks.timeout > PATIENCE, "else who waits for a lost rank would end well too"
    done = start([sys.executable, "train/main.py", "--spawn", "2", *TINY, *model])
    assert done.returncode == code, done.stderr
    # If it has the time.
    named = re.search("^error: rank 0: rank 1 (failed|is gone)", done.stderr, re.MULTILINE)
    assert done.stderr.count(said) == (2 if named and named[1] == "failed" else 1)
    assert done.stderr.count("Traceback") == said.startswith("ValueError")


@contextlib.contextmanager
def training(arguments, line, folder):
    """Start the program in a session of its own and wait for a line of output; kill what is left."""
    run = Program([sys.executable, str(ROOT / "train" / "main.py"), *arguments], folder, environment())
    try:
        next(said for said in run.stdout if line in said)
        yield run
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)


@LINUX
def test_ranks_do_not_outlive_a_launcher_that_was_killed(tmp_path):
    given = [*TINY, "--epochs", "9999", "--lr", "0.01", "--out", str(tmp_path / "x")]
    with training([*given, "--spawn", "2"], " 1/9999", tmp_path) as run:
        run.kill()
        run.communicate(timeout=30)  # reads on until no rank has stdout open any more


@LINUX
def test_ranks_do_not_outlive_a_launcher_that_was_killed_as_soon_as_it_had_started_them(tmp_path):
    command = [sys.executable, "train/main.py", "--spawn", "2", *TINY, "--out", str(tmp_path / "x")]
    run = Program(command, ROOT, environment())
    children, end = Path(f"/proc/{run.pid}/task/{run.pid}/children"), time.monotonic() + 60
    while len(children.read_text().split()) < 2:
        assert time.monotonic() < end
    run.kill()
    assert "saved" not in run.communicate(timeout=30)[0]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
@pytest.mark.parametrize("flags", [TINY, ["--help"]], ids=["training", "help"])
def test_a_full_stdout_is_reported_in_one_line(tmp_path, flags):
    with open("/dev/full", "w") as full:
        ended = with_stdout(full.fileno(), *flags, "--out", str(tmp_path / "x"))
    assert ended == (1, "error: standard output: no space left on device\n")


@pytest.mark.parametrize("flags", [["--help"], ["--preview", *TINY]], ids=["help", "preview"])
def test_what_nobody_reads_to_its_end_ends_quietly(flags):
    reader, writer = os.pipe()
    os.close(reader)
    assert with_stdout(writer, *flags) == (141, "")
    os.close(writer)


def with_stdout(fd: int, *flags: str) -> tuple[int | None, str]:
    """Run the program with a descriptor as its stdout; return its exit code and stderr."""
    run = Program([sys.executable, "train/main.py", *flags], ROOT, environment(), stdout=fd)
    _, errors = run.communicate(timeout=60)
    return run.returncode, errors


def test_training_goes_on_after_the_readers_of_both_streams_have_gone(tmp_path):
    """Its last lines are then missing, so it ends with exit code 1."""
    with training([*TINY, "--epochs", "9", "--out", "run"], "train loss", tmp_path) as run:
        run.stdout.close()
        run.stderr.close()
        run.wait(timeout=60)
    assert run.returncode == 1
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["progress"]["epoch"] == 9
    assert not (tmp_path / "run" / "attempts.json").exists()


@pytest.mark.covered(lambda ranks: ranks == 1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_saves_and_prints_the_command_that_continues(tmp_path, ranks):
    spawn = ["--spawn", str(ranks)] if ranks > 1 else []
    given = ["--data", "fake:40", "--epochs", "999", "--lr", "0.01", "--batch-size", "8", "--out", "my run"]
    with training([*given, *spawn], " 2/999", tmp_path) as run:
        os.killpg(run.pid, signal.SIGINT)  # as a terminal sends it: to all that it has in front
        said, errors = run.communicate(timeout=60)
    assert (run.returncode, errors) == (130, "")
    ended = said[said.index("ended   by SIGINT after step ") : said.index("\nnext:")]
    assert max(len(line) for line in ended.splitlines() if str(ROOT) not in line) <= 80
    command = ended.partition("\nto continue:\n  ")[2].replace(" \\\n     ", "")
    program, arguments = command.split(f" {ROOT}/train/main.py ")  # not under the folder that it runs in
    assert program == "python"
    expected = command_line.parse([*given, *spawn, "--resume", "auto"])
    assert command_line.parse(shlex.split(arguments)) == expected


def test_how_to_go_on_depends_on_what_is_saved_and_on_the_launcher(tmp_path, monkeypatch):
    data, model = trainings.tensors((10,), 8), torch.nn.Linear(10, 10)
    with process_group(trainings.place(0, 1), timeout=5):
        trainer = trainings.trainer(0, 1, data, model)
        reporter = report.Report(trainer, str(tmp_path))
        assert "nothing was saved yet" in reporter.how_to_go_on()
        (tmp_path / "last.pt").touch()
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        trainer.place = trainings.place(0, 2)
        said = reporter.how_to_go_on()
    assert said.startswith("to continue:\n  torchrun --nproc-per-node 2 train/main.py ")
    assert "--spawn" not in said


def test_stop_at_a_step_that_is_done_takes_none_and_is_not_proposed_again(tmp_path, capsys):
    given = [*TINY, "--epochs", "3", "--out", str(tmp_path)]
    for stop in ("5", "4"):
        assert main.main([*given, "--resume", "auto", "--stop-at", stop]) == 0
        said = capsys.readouterr().out
        assert "ended   by --stop-at\nto continue:" in said and "--stop-at " not in said
    assert torch.load(tmp_path / "last.pt", weights_only=True)["progress"]["global_step"] == 5
    elsewhere = [*given[:-1], str(tmp_path / "b"), "--resume", str(tmp_path / "last.pt"), "--stop-at", "4"]
    assert main.main(elsewhere) == 0
    said = capsys.readouterr().out
    assert said.endswith("nothing was saved yet (--save-every N[steps|epochs])\n") and "saved   " not in said


def test_programs_are_proposed_by_a_path_that_works_in_the_working_directory(tmp_path, monkeypatch):
    elsewhere = f"{ROOT}/train/main.py"
    paths = {ROOT: "train/main.py", ROOT / "train": "main.py", ROOT / "docs": elsewhere, tmp_path: elsewhere}
    for folder, path in paths.items():
        monkeypatch.chdir(folder)
        assert command_line.program("main") == path


ENDS = {
    "well": (None, 0),
    "refused": (CkptToolError("no"), 3),
    "differing": (RanksDiffer("rank 1 differs"), 1),
    "lost": (RuntimeError("Connection closed by peer [127.0.0.1]"), 1),
    "timed out": (RuntimeError("Timed out waiting 1000ms for recv operation to complete"), 1),
    "interrupted": (KeyboardInterrupt(), 130),
}


def gloo_threads(seconds: float = 0.0) -> list[str]:
    """Threads of process groups in this process, which one that outlives its group can end by SIGABRT.

    Those that stay: the system lists a thread a moment longer than a join of it takes, 3 of 200,000 on a
    machine with twice as many busy processes as cores.
    """
    end, found = time.monotonic() + seconds, ["gloo"]
    while found:
        found = []
        for path in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                found += [name for name in (path.read_text().strip(),) if "gloo" in name]
        if time.monotonic() >= end:
            break
        time.sleep(0.01)
    return found


@LINUX
@pytest.mark.parametrize("end", ENDS)
def test_the_process_group_is_destroyed_with_its_threads_on_every_way_out(monkeypatch, end, tmp_path, capsys):
    error, code = ENDS[end]
    monkeypatch.setattr(launch, "PATIENCE", 0)
    seen = []

    def train(job: Job) -> None:
        trainer = Trainer(job.config, job.data, job.model, job.place, job.task)
        seen.append(dist.is_initialized() and bool(gloo_threads()))
        if error is not None:
            raise error
        trainer.itself = trainer  # models and hooks are often cycles of references

    monkeypatch.setattr(main, "train", train)
    assert main.main([*TINY, "--out", str(tmp_path)]) == code
    assert seen == [True]
    assert not dist.is_initialized()
    assert gloo_threads(seconds=2) == []
    said = capsys.readouterr().err
    assert len(said.split("\n")) == {"well": 1, "interrupted": 3}.get(end, 2)


def raising(error: BaseException) -> Callable[[Any], None]:
    def work(_: Any) -> None:
        raise error

    return work


def test_a_bug_is_not_hidden_and_the_process_group_is_destroyed(monkeypatch, tmp_path):
    monkeypatch.setattr(main, "train", raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main.main([*TINY, "--out", str(tmp_path)])
    assert not dist.is_initialized()


@pytest.mark.parametrize(("error", "rank", "waits"), [
    (CkptToolError("own"), "1", False),
    (RankFailed("of another"), "1", True),
    (RanksDiffer("all know"), "0", False),
    (RanksDiffer("all know"), "1", True),
])  # fmt: skip
def test_a_rank_that_repeats_an_error_waits_for_the_rank_that_had_it(monkeypatch, error, rank, waits):
    slept: list[float] = []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(launch.time, "sleep", slept.append)
    launch.run_program(lambda: None, raising(error))
    assert bool(slept) == waits


@pytest.mark.parametrize(
    ("end", "said"), [("lost", "lost the connection"), ("timed out", "no answer from another rank")]
)
def test_lost_and_late_ranks_are_reported_as_json_too(monkeypatch, capsys, end, said):
    error, code = ENDS[end]
    monkeypatch.setattr(launch, "PATIENCE", 0)
    assert launch.run_program(lambda: None, raising(error), as_json=True) == code
    assert said in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_rank_that_cant_join_the_group_says_so(monkeypatch, tmp_path, capsys):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert main.main([*TINY, "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: rank 0 could not join the others: ")
    assert "MASTER_PORT" in said and said.count("\n") == 1


# ---- when a run evaluates, saves and ends --------------------------------------------------------------


STEPS = 4


def clock(speed: float = 1.0) -> Callable[[], float]:
    """Return a clock that goes on by some seconds whenever it is read."""
    return itertools.count(speed, speed).__next__


def position(global_step: int) -> Progress:
    """Return the position after a step, in which an epoch that ends is not counted yet."""
    epoch = (global_step - 1) // STEPS
    return Progress(epoch=epoch, step=global_step - epoch * STEPS, global_step=global_step)


FAR = {"epochs": 9}
COURSES: dict[str, tuple[dict[str, Any], float, list[int], list[int], str]] = {
    "each epoch, and the last one ends it": ({"epochs": 3}, 1, [4, 8, 12], [4, 8, 12], "--epochs"),
    "counted from the beginning of the training": (
        {**FAR, "eval_every": Every(3, "steps"), "save_every": Every(2, "epochs")}, 1, [3, 6, 9, 12], [8], ""
    ),
    "the end is evaluated and saved whatever the intervals": (
        {"epochs": 2, "eval_every": Every(5, "epochs"), "save_every": Every(1, "h")}, 1, [8], [8], "--epochs"
    ),
    "--max-steps in the middle of an epoch": ({**FAR, "max_steps": 6}, 1, [4, 6], [4, 6], "--max-steps"),
    "--max-time saves and does not evaluate": ({**FAR, "max_time": 4.5}, 1, [4], [4, 5], "--max-time"),
    "a time since the last save": ({**FAR, "save_every": Every(3, "s")}, 1, [4, 8, 12], [3, 6, 9, 12], ""),
    "a time in minutes": ({**FAR, "save_every": Every(1, "min")}, 40, [4, 8], [2, 4, 6, 8], ""),
}  # fmt: skip


@pytest.mark.parametrize("course", COURSES)
def test_what_is_due_after_each_step(course):
    settings, speed, evaluated, saved, end = COURSES[course]
    limits = Limits(TrainConfig.of(**settings), lambda: STEPS, clock(speed))
    last = max(evaluated + saved)
    found = {step: limits.due(position(step)) for step in range(1, last + 1)}
    assert [step for step, due in found.items() if due.evaluate] == evaluated
    assert [step for step, due in found.items() if due.save] == saved
    assert {step: due.end for step, due in found.items() if due.end} == ({last: end} if end else {})


def test_a_training_that_has_all_its_steps_is_over_before_it_begins():
    limits = Limits(TrainConfig.of(epochs=2, max_steps=6), lambda: STEPS)
    assert not limits.is_over(position(5))
    assert limits.is_over(position(6))
    assert limits.is_over(Progress(epoch=2, step=0, global_step=5))
    assert not limits.is_over(Progress())


@pytest.mark.parametrize("counted", [False, True])
def test_the_end_of_an_epoch_is_seen_whether_it_is_counted_or_not(counted):
    limits = Limits(TrainConfig.of(epochs=3), lambda: STEPS)
    at = Progress(epoch=1, step=0, global_step=4) if counted else position(4)
    assert limits.due(at) == Due(evaluate=True, save=True)


def test_the_schedule_is_as_long_as_the_training():
    assert total_steps(TrainingConfig(epochs=3), STEPS) == 12
    assert total_steps(TrainingConfig(epochs=3, max_steps=7), STEPS) == 7
    assert total_steps(TrainingConfig(epochs=3, max_steps=70), STEPS) == 12
    assert total_steps(TrainingConfig(epochs=3, max_time=1.0), STEPS) == 12


def on_rank(rank: int, world_size: int) -> list[Due]:
    config = TrainConfig.of(epochs=99, max_time=9.5, save_every=Every(4, "s"))
    limits = Limits(config, lambda: STEPS, clock(1.0 + 50 * rank))
    return [limits.due(position(step)) for step in range(1, 12)]


def test_rank_0_s_clock_decides_for_all_ranks(run_ranks):
    first, *others = run_ranks(3, on_rank)
    assert [due.save for due in first[:8]] == [False, False, False, True] * 2
    assert [due.end for due in first].index("--max-time") == 9
    assert all(other == first for other in others)


def never_asked(rank: int, world_size: int) -> bool:
    if rank == 0:  # alone: a collective would wait for the others
        Limits(TrainConfig.of(epochs=3), lambda: STEPS).due(position(1))
    return collectives.world_size() == world_size


def test_nothing_is_sent_without_a_time(run_ranks):
    assert run_ranks(2, never_asked) == [True, True]
