"""Commands that run at the same time in one folder: each output is that of one of them, whole."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool

TOGETHER = """
    import json, os, sys
    from ckpttool import cli
    jobs = json.loads(sys.argv[1])
    cli.run([*jobs[0], "-q", "--dry-run"])  # import what forks need
    gate, start = os.pipe()
    pids = []
    for words in jobs:
        pid = os.fork()
        if pid == 0:
            os.close(start)
            os.read(gate, 1)  # until all are there
            code = 0
            for _ in range(int(sys.argv[2])):
                code = code or cli.run([*words, "-q"])
            os._exit(code)
        pids.append(pid)
    os.close(start)
    print(json.dumps(pids), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
"""


@contextmanager
def together(folder: Path, jobs: list[list[str]], times: int = 1) -> Iterator[tuple[list[int], Any]]:
    """Run several commands in processes that start at the same moment."""
    command = [sys.executable, "-c", textwrap.dedent(TOGETHER), json.dumps(jobs), f"{times}"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, text=True, **streams) as running:  # type: ignore[call-overload]
        assert running.stdout is not None
        yield json.loads(running.stdout.readline()), running


def codes_of(running: subprocess.Popen[str]) -> list[int]:
    """Wait for all and return their exit codes; nobody may have shown a traceback."""
    out, err = running.communicate(timeout=100)
    assert err == "", err
    found: list[int] = json.loads(out)
    return found


def prepare(folder: Path, count: int = 2) -> list[str]:
    """Write inputs in.0.pt, in.1.pt, … of different values; return the digests of their states stripped."""
    digests = []
    for number in range(count):
        torch.save({"module.a": torch.full((50_000,), float(number))}, folder / f"in.{number}.pt")
        stripped, _ = ckpttool.strip_prefix(ckpttool.open(folder / f"in.{number}.pt"))
        digests.append(ckpttool.digest(stripped))
    return digests


def left_in(folder: Path) -> list[str]:
    """Return what is in a folder beside inputs and outputs."""
    return [name for name in os.listdir(folder) if not name.startswith(("in.", "out"))]


def run(folder: Path, words: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "ckpttool", *words, "-q"], cwd=folder, check=True)


OUTPUTS = ["out.pt", "out.safetensors", "out/"]


@pytest.mark.covered(lambda output: output == "out.safetensors")
@pytest.mark.parametrize("output", OUTPUTS)
def test_two_writers_both_succeed_and_a_reader_has_what_one_wrote(output: str, tmp_path: Path) -> None:
    digests = prepare(tmp_path)
    jobs = [["strip-prefix", f"in.{number}.pt", output, "--force"] for number in range(2)]
    seen: list[str] = []
    with together(tmp_path, jobs, times=20) as (_, running):
        while running.poll() is None and not is_done(running):
            if (tmp_path / output).exists():
                with ckpttool.open(tmp_path / output) as checkpoint:
                    time.sleep(0.001)  # it may be replaced between opening and reading
                    seen.append(ckpttool.digest(checkpoint))
        assert codes_of(running) == [0, 0]
    assert {*seen, ckpttool.digest(tmp_path / output)} <= {*digests}
    assert len(seen) > 1
    assert left_in(tmp_path) == []


def is_done(running: subprocess.Popen[str]) -> bool:
    """Return whether the processes have ended: then their exit codes can be read."""
    assert running.stdout is not None
    return bool(select.select([running.stdout], [], [], 0)[0])


@pytest.mark.long
def test_a_hundred_processes_write_into_one_folder_at_once(tmp_path: Path) -> None:
    """Half of them write one output, the others one each."""
    digests = prepare(tmp_path)
    outputs = ["out.pt" if number % 4 < 2 else f"out{number}.pt" for number in range(100)]
    jobs = [["strip-prefix", f"in.{at % 2}.pt", output, "--force"] for at, output in enumerate(outputs)]
    with together(tmp_path, jobs) as (_, running):
        assert codes_of(running) == [0] * 100
    assert ckpttool.digest(tmp_path / "out.pt") in digests
    for number in range(2, 100, 4):
        assert ckpttool.digest(tmp_path / f"out{number}.pt") == digests[0]
    assert left_in(tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize("output", OUTPUTS)
def test_killed_writers_leave_a_whole_output_and_the_next_one_cleans_up(output: str, tmp_path: Path) -> None:
    digests = prepare(tmp_path)
    jobs: list[list[str]] = [["strip-prefix", f"in.{n % 2}.pt", output, "--force"] for n in range(6)]
    run(tmp_path, jobs[0])
    drawn = random.Random(0)
    with together(tmp_path, jobs, times=10) as (pids, running):
        for pid in pids[:4]:
            time.sleep(drawn.random() / 20)
            with contextlib.suppress(ProcessLookupError):  # it was done already
                os.kill(pid, signal.SIGKILL)
        codes = codes_of(running)
    assert codes[4:] == [0, 0]
    assert {*codes[:4]} <= {0, -signal.SIGKILL}
    assert ckpttool.digest(tmp_path / output) in digests
    run(tmp_path, jobs[0])
    assert ckpttool.digest(tmp_path / output) == digests[0]
    assert left_in(tmp_path) == []
