"""Signals: a command ends by the signal itself, so that a shell stops too, and without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LOOP = """
for i in 1 2 3; do
    echo started >> log
    "$PYTHON" -m ckpttool inspect - < pipe
done
"""


def wait_for(path: Path, text: str) -> None:
    """Wait until a file holds a text, for at most twenty seconds."""
    end = time.monotonic() + 20
    while text not in (path.read_text() if path.exists() else ""):
        assert time.monotonic() < end, f"no '{text}' in {path.name}"
        time.sleep(0.02)


@pytest.mark.parametrize("seconds", [0.0, 1.5], ids=["while importing", "while reading"])
def test_ctrl_c_stops_a_shell_loop(seconds: float, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    env = {**os.environ, "PYTHON": sys.executable}
    with subprocess.Popen(
        ["bash", "-c", LOOP], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as shell:
        writer = os.open(tmp_path / "pipe", os.O_WRONLY)  # the command waits for what comes through it
        wait_for(tmp_path / "log", "started")
        time.sleep(seconds)
        os.killpg(shell.pid, signal.SIGINT)
        _, said = shell.communicate(timeout=20)
        os.close(writer)
    assert shell.returncode in (-signal.SIGINT, 130)
    assert (tmp_path / "log").read_text() == "started\n"
    if seconds:
        assert "Traceback" not in said and "interrupted" in said


def test_ctrl_c_while_modules_are_imported_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "click").mkdir()
    slow = "import pathlib, time\npathlib.Path('importing').write_text('click')\ntime.sleep(20)\n"
    (tmp_path / "click" / "__init__.py").write_text(slow)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", "ckpttool", "--help"], cwd=tmp_path, env=env, stderr=subprocess.PIPE
    ) as running:
        wait_for(tmp_path / "importing", "click")
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=20)
    assert (running.returncode, said) == (-signal.SIGINT, b"")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_ignored_stays_ignored(number: int, tmp_path: Path) -> None:
    code = (
        f"import signal, sys, os\nsignal.signal({int(number)}, signal.SIG_IGN)\n"
        "from ckpttool import cli\nfrom ckpttool.cli import program\n"
        f"program.run = lambda arguments: os.kill(os.getpid(), {int(number)}) or 0\n"
        "cli.main()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=tmp_path).returncode == 0


def test_code_of_the_user_s_that_catches_system_exit_does_not_hold_up_sigterm(tmp_path: Path) -> None:
    code = (
        "import signal, os\nfrom ckpttool import cli\nfrom ckpttool.cli import program\n"
        "def run(arguments):\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    except (Exception, SystemExit):\n        return 0\n"
        "program.run = run\ncli.main()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=False, cwd=tmp_path)
    assert ran.returncode == -signal.SIGTERM
