"""The command line: parses, calls the library, prints. The only rooms that know click."""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType
from typing import Any

import click

from .. import __version__
from . import add_prefix, convert, digest, inspect, reload, rename_keys, slim, strip_prefix, verify
from .console import fail


class ReaderGone(Exception):
    """Whoever read our output has stopped (`| head`)."""


class Commands(click.Group):
    """The group of all commands. click itself would take a broken pipe for success."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise ReaderGone from error


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done; 1 differs, a check failed, nothing to do; 2 usage; 3 unreadable or refused.",
)
@click.version_option(__version__, prog_name="ckpttool", message="%(prog)s %(version)s")
def group() -> None:
    """A workbench for PyTorch checkpoints.

    Reads .pt files of any age and .safetensors without torch, without loading them, and without running
    anything that they name.
    """


for module in (inspect, strip_prefix, add_prefix, rename_keys, convert, slim, digest, verify, reload):
    group.add_command(module.command)


def main() -> None:
    """The entry point: runs a command and turns every expected failure into one line and an exit code."""
    gc.disable()  # a command is over before garbage in cycles could matter, and a search visits every tensor
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # keys may hold what the terminal can't show
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup sets that
            signal.signal(number, _terminate)
    sys.exit(_run(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    try:
        if not arguments:
            group(["--help"], prog_name="ckpttool", standalone_mode=False)
            return 2
        return group(arguments, prog_name="ckpttool", standalone_mode=False) or 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except ReaderGone:
        # What is left in the buffer must not be tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if os.environ.get("CKPTTOOL_DEBUG") == "1":
            raise
        return fail(error, as_json="--json" in arguments)


def _terminate(signum: int, frame: FrameType | None) -> None:
    """SIGTERM and SIGHUP unwind the stack, so that no half-written file stays behind."""
    sys.exit(128 + signum)
