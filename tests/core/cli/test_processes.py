"""Commands as processes: how they end by a signal, and what code of the user's that --model names may do: its
prints stay off stdout, and what it left to atexit runs."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.forked import WarmPython

# Signals.

LOOP = """
for i in 1 2 3; do
    echo started >> log
    "$PYTHON" -m ckpttool inspect - < pipe
done
"""


def wait_for(path: Path, text: str) -> None:
    """Wait until a file holds a text, for at most a minute."""
    end = time.monotonic() + 60
    while text not in (path.read_text() if path.exists() else ""):
        assert time.monotonic() < end, f"no '{text}' in {path.name}"
        time.sleep(0.02)


def wait_until_read(pipe: int) -> None:
    """Write a byte, and wait until it is read, for at most a minute."""
    os.write(pipe, b"\x80")
    end, left = time.monotonic() + 60, bytes(4)
    while struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, left))[0]:
        assert time.monotonic() < end, "nobody reads"
        time.sleep(0.02)


@pytest.mark.parametrize("reading", [False, True], ids=["while importing", "while reading"])
def test_ctrl_c_stops_a_shell_loop(reading: bool, here: Path) -> None:
    os.mkfifo("pipe")
    given: Any = {"env": {**os.environ, "PYTHON": sys.executable}, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(["bash", "-c", LOOP], start_new_session=True, **given) as shell:
        writer = os.open("pipe", os.O_WRONLY)  # the command waits for what comes through it
        wait_for(here / "log", "started")
        if reading:
            wait_until_read(writer)
        os.killpg(shell.pid, signal.SIGINT)
        _, said = shell.communicate(timeout=60)
        os.close(writer)
    assert shell.returncode in (-signal.SIGINT, 130)
    assert Path("log").read_text() == "started\n"
    if reading:
        assert "Traceback" not in said and "interrupted" in said


def test_ctrl_c_while_modules_are_imported_says_nothing(here: Path) -> None:
    Path("click").mkdir()
    slow = "import pathlib, time\npathlib.Path('importing').write_text('click')\ntime.sleep(20)\n"
    Path("click/__init__.py").write_text(slow)
    command = [sys.executable, "-m", "ckpttool", "--help"]
    env = {**os.environ, "PYTHONPATH": str(here)}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE) as running:
        wait_for(here / "importing", "click")
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert (running.returncode, said) == (-signal.SIGINT, b"")


INTERRUPTED = """
import os, sys
from ckpttool.core import cli
from ckpttool.core.files import copying
whole = copying.Output.copy
def copy(self, range):
    whole(self, range)
    os.kill(os.getpid(), NUMBER)  # in the middle of writing
copying.Output.copy = copy
sys.argv = ["ckpttool", "convert", "in.pt", "out.pt"]
cli.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_command_that_is_interrupted_leaves_no_file_behind(number: int) -> None:
    torch.save({"a": torch.ones(100_000), "b": torch.ones(100_000)}, "in.pt")  # each copied by itself
    command = [sys.executable, "-c", INTERRUPTED.replace("NUMBER", str(int(number)))]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == -number
    assert ran.stderr.split() == (["interrupted"] if number == signal.SIGINT else [])
    assert os.listdir() == ["in.pt"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_ignored_stays_ignored(number: int) -> None:
    code = (
        f"import signal, sys, os\nsignal.signal({int(number)}, signal.SIG_IGN)\n"
        "from ckpttool.core import cli\nfrom ckpttool.core.cli import program\n"
        f"program.run = lambda arguments: os.kill(os.getpid(), {int(number)}) or 0\n"
        "cli.main()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_code_of_the_user_s_that_catches_system_exit_does_not_hold_up_sigterm() -> None:
    code = (
        "import signal, os\nfrom ckpttool.core import cli\nfrom ckpttool.core.cli import program\n"
        "def run(arguments):\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    except (Exception, SystemExit):\n        return 0\n"
        "program.run = run\ncli.main()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGTERM


def test_a_command_with_stdout_closed_exits_as_usual() -> None:
    command = f"{shlex.quote(sys.executable)} -m ckpttool --version >&-"
    ran = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")


# Code of the user's.

SOURCE = """
import atexit, os, pathlib, subprocess
import torch

atexit.register(lambda: pathlib.Path("left.txt").write_text("atexit ran"))
atexit.register(print, "goodbye")
print("imported")

class Talking(torch.nn.Sequential):
    def forward(self, x):
        print("forward")
        return super().forward(x)

def make():
    print("made")
    os.system("echo of a child process")
    return Talking(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
"""


@pytest.fixture
def training(here: Path) -> None:
    Path("net.py").write_text(SOURCE)
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    adam = torch.optim.Adam(net.named_parameters())
    net(torch.ones(3, 2)).sum().backward()
    adam.step()
    torch.save({"model": net.state_dict(), "optimizer": adam.state_dict()}, "last.pt")


@pytest.mark.usefixtures("training")
@pytest.mark.parametrize(
    "command",
    [
        "reload last.pt --input-shape 4,2",
        "doctor last.pt",
        "convert-batchnorm last.pt out.pt --to sync",
        "optimizer last.pt out.pt --to names",
    ],
)
def test_what_the_model_prints_goes_to_stderr_and_what_it_left_to_atexit_runs(
    command: str, warm_python: WarmPython
) -> None:
    ran = warm_python.run("-m", "ckpttool", *command.split(), "--model", "net.py:make", "--json")
    assert ran.returncode == 0, ran.stderr
    json.loads(ran.stdout)
    for word in (b"imported", b"made", b"of a child process", b"goodbye"):
        assert word in ran.stderr
    assert Path("left.txt").read_text() == "atexit ran"


@pytest.mark.usefixtures("training")
def test_an_output_on_stdout_holds_no_prints_of_the_model(warm_python: WarmPython) -> None:
    command = "optimizer last.pt - --to names --model net.py:make"
    ran = warm_python.run("-m", "ckpttool", *command.split())
    assert (ran.returncode, ran.stdout[:2]) == (0, b"PK")
    Path("out.pt").write_bytes(ran.stdout)
    assert torch.load("out.pt")["optimizer"]["param_groups"][0]["params"][0] == "0.weight"


@pytest.mark.usefixtures("training")
def test_the_exit_code_stays_when_atexit_runs(warm_python: WarmPython) -> None:
    torch.save({"0.weight": torch.ones(3, 3)}, "other.pt")
    ran = warm_python.run("-m", "ckpttool", "reload", "other.pt", "--model", "net.py:make")
    assert (ran.returncode, Path("left.txt").exists()) == (1, True)
