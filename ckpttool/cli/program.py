"""The program: run a command, turn every expected failure into one line, end with an exit code."""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

import click

from .all_commands import ReaderGone, group
from .failure import Call, fail


def main() -> NoReturn:
    """Run the command of `sys.argv` and exit with its code."""
    gc.disable()  # a command ends before garbage in cycles matters, and a collection visits every tensor
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads would spin while waiting for work
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the end
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # keys may hold what the terminal can't show
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup sets that
            signal.signal(number, _terminate)
    code = run(sys.argv[1:])
    if "ckpttool.models.factory" in sys.modules:  # code of the user's ran, and may have left work to atexit
        _close_stdout()
        sys.exit(code)
    # Every line was flushed when it was printed. Freeing the objects of a file with very many tensors would
    # take as long as reading it.
    os._exit(code)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code, with every expected failure printed as one line.

    Args:
        arguments: the command line without the program's name; none prints the help and returns 2.

    Raises:
        Exception: a bug of this program, or any failure if the environment has CKPTTOOL_DEBUG=1.
    """
    call = Call()
    try:
        if not arguments:
            group(["--help"], prog_name="ckpttool", standalone_mode=False)
            return 2
        return group(arguments, prog_name="ckpttool", standalone_mode=False, obj=call) or 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except (ReaderGone, BrokenPipeError):
        return 141
    except Exception as error:
        if os.environ.get("CKPTTOOL_DEBUG") == "1":
            raise
        try:
            return fail(error, as_json="--json" in arguments, call=call)
        except BrokenPipeError:
            return 141


def _close_stdout() -> None:
    """Send what is printed from now on to stderr: it is not part of our output."""
    try:
        sys.stdout.flush()
        os.dup2(2, 1)
    except OSError:  # the reader has gone, or the disk is full: nor must the rest be written again at exit
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _terminate(signum: int, frame: FrameType | None) -> None:
    """Unwind the stack at SIGTERM and SIGHUP, so that no half-written file stays."""
    sys.exit(128 + signum)
