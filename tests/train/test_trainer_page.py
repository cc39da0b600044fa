"""The trainer's pages: docs/flags.md has the flags of the program, and commands of the others run.

`make docs` writes the flags.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.programs import ROOT, environment
from tests.support.generated_page import generated, regenerate
from train.config import command_line, flags
from train.config.sections import TrainConfig

DOCS = ROOT / "docs"
PAGE, MACHINES = DOCS / "flags.md", DOCS / "several-machines.md"
TASKS = ("trainer", "own-code", "streams", "optimizers", "saving", "same-bits", "sharding", "log")
BEGIN, END = "<!-- flags -->\n", "<!-- /flags -->"
BLOCK = re.compile(r"^```(\w+)(?: (\w+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)


# ---- the flags -----------------------------------------------------------------------------------------


def reference() -> str:
    """Return the generated part: a list of flags for each heading of the help."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    fields = flags.flags_in(TrainConfig)
    for group in flags.GROUPS:
        yield from ("", f"## {group.capitalize()}", "")
        for field in fields:
            if field.metadata["group"] == group:
                yield f"- `{_usage(field)}`: {field.metadata['help']}"
    yield "\n"


def _usage(field: dataclasses.Field[Any]) -> str:
    """Return a flag with the value that it takes."""
    options = field.metadata
    values = "|".join(options["choices"]) if "choices" in options else options.get("metavar", "")
    values = f"[{values}]" if options.get("nargs") == "?" else values
    return f"{flags.name_of(field)} {values}".strip()


def write(page: Path = PAGE) -> None:
    regenerate(page, BEGIN, END, reference())


def test_the_page_says_what_the_program_says():
    assert generated(PAGE, BEGIN, END) == reference(), "docs/flags.md is stale: run `make docs`"


def test_every_flag_of_the_program_is_on_the_page():
    shown = re.findall(r"^- `(--[a-z-]+)", reference(), re.MULTILINE)
    taken = [flag for flag in command_line.train_parser()._option_string_actions if flag.startswith("--")]
    assert sorted(shown) == sorted(set(taken) - {"--help"})


def test_each_part_of_the_trainer_names_flags_and_tests_that_exist():
    rows = re.findall(r"^\| .*\.py` \|$", (DOCS / "trainer.md").read_text(encoding="utf-8"), re.MULTILINE)
    known = command_line.train_parser()._option_string_actions
    assert len(rows) > 10
    assert {flag for row in rows for flag in re.findall(r"--[a-z-]+", row)} <= {*known}
    tests = [name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row)]
    assert [name for name in tests if not (ROOT / name).is_file()] == []


# ---- the commands --------------------------------------------------------------------------------------


def blocks(language: str, name: str = "", *, pages: tuple[str, ...] = TASKS) -> list[str]:
    text = "".join((DOCS / f"{page}.md").read_text(encoding="utf-8") for page in pages)
    return [block for lang, title, block in BLOCK.findall(text) if (lang, title) == (language, name)]


def commands(text: str) -> list[str]:
    """Return the commands of a block, each in one line and without its comment."""
    whole = text.replace("\\\n", " ").splitlines()
    return [shlex.join(shlex.split(line, comments=True)) for line in whole if line.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the commands of the pages can run as they stand."""
    folder = tmp_path_factory.mktemp("page")
    for name in ("train", "examples"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "run.toml").write_text("\n".join(blocks("toml")))
    return folder


def shell(command: str, folder: Path, env: dict[str, str], **given: Any) -> subprocess.Popen[str]:
    """Start a command in a session of its own."""
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True, **given}
    return subprocess.Popen(["bash", "-c", command], cwd=folder, env=environment(**env), text=True, **given)


def run(command: str, folder: Path) -> str:
    done = shell(command, folder, PATHS)
    said, _ = done.communicate(timeout=200)
    assert done.returncode == 0, f"{command}\n{said}"
    return said


PATHS = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def follow(page: str, folder: Path) -> None:
    """Run the commands of a page with its own code alone, as of a reader who reads no other."""
    (folder / "own.py").write_text("\n".join(blocks("python", pages=(page,))))
    for text in blocks("sh", pages=(page,)):
        for command in commands(text):
            run(command, folder)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in TASKS if page != "log"])
def test_the_commands_of_a_page_run_one_after_another(page, folder):
    follow(page, folder)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_page_about_the_log_draws_and_reads_the_runs_of_the_first_page(folder, monkeypatch):
    pytest.importorskip("matplotlib")
    if not (folder / "runs" / "two").exists():
        follow("trainer", folder)
    follow("log", folder)
    assert (folder / "curves.png").exists()
    (code,) = blocks("python", "log")
    found: dict[str, Any] = {}
    monkeypatch.chdir(folder)
    exec(code, found)
    assert found["best"]["accuracy"] > 0.5 and found["losses"]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_commands_for_two_nodes_train_together(folder):
    (text,) = blocks("sh", "nodes")
    here = text.replace("node0", "127.0.0.1").replace("29500", str(free_port()))
    here = here.replace("--nproc-per-node 4", "--nproc-per-node 1")
    first, second = (f"{command} --data fake:16 --batch-size 8 --epochs 1" for command in commands(here))
    other = shell(f"exec {second}", folder, PATHS)
    try:
        said = run(first, folder)
        told, _ = other.communicate(timeout=60)
    finally:
        other.kill()
    assert "ranks   2 on cpu" in said and (folder / "runs" / "a" / "last.pt").exists()
    assert (other.returncode, told) == (0, "")


STUBS = {
    "scontrol": """[ $1 = show ] && echo 127.0.0.1 && echo other
        [ $1 = requeue ] && echo "requeue $2" """,
    # as SLURM's own, it starts two tasks and hands SIGTERM on
    "srun": """"$@" & first=$!; "$@" & second=$!
        trap 'kill -TERM $first $second' TERM
        wait $first $second; wait $first $second""",
}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_script_for_slurm_saves_at_its_signal_and_goes_back_into_the_queue(folder):
    script = next(text for lang, name, text in BLOCK.findall(MACHINES.read_text()) if name == "slurm")
    stubs = folder / "slurm"
    stubs.mkdir()
    for name, text in STUBS.items():
        (stubs / name).write_text(f"#!/bin/bash\n{text}\n")
        (stubs / name).chmod(0o755)
    script = script.replace("29500", str(free_port())).replace("--nproc-per-node 4", "--nproc-per-node 1")
    settings = "--data fake:64 --epochs 999 --save-every 5steps"
    (folder / "job.sh").write_text(script.replace("--save-every 10min", settings))
    given = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "job", "SLURM_RESTART_COUNT": "0"}
    paths = {**PATHS, "PATH": f"{stubs}{os.pathsep}{PATHS['PATH']}", "PYTHONUNBUFFERED": "1"}
    job = shell("exec bash job.sh", folder, {**given, **paths})
    try:
        end = time.monotonic() + 120
        while not (folder / "runs" / "job" / "last.pt").exists() and time.monotonic() < end:
            time.sleep(0.1)
        job.send_signal(signal.SIGUSR1)
        said, _ = job.communicate(timeout=100)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert said.count("ranks   2 on cpu") == 1, said
    assert "SIGTERM after step" in said, said
    assert said.rstrip().endswith("requeue 7"), said


if __name__ == "__main__":
    write()
