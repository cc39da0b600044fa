"""The program: run a command, turn every expected failure into one line, end with an exit code."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from types import FrameType
from typing import Any, NoReturn

import click

from ... import __version__
from ...rooms import offered
from .. import system
from . import convert, for_programs, keys
from .failure import Call, fail, left_by
from .options import Addition, Command, Context, rank_of_torchrun

OTHER_NAMES = {name: ["inspect"] for name in ("info", "show", "ls", "summary")}  # as other tools have them

EPILOG = """\
Exit codes: 0 done, or same; 1 differs, a check failed or nothing to do;
2 usage; 3 unreadable, damaged or refused.

`ckpttool COMMAND --help` ends in an example. Completion of commands, options
and files: eval "$(_CKPTTOOL_COMPLETE=bash_source ckpttool)", or zsh_source.
"""

# The headings of the help, each with the commands that name it
HEADINGS = ("Look", "Rename", "Convert", "Train on", "Keep", "Check", "Load", "For programs")
SECTIONS: dict[str, list[Command]] = {heading: [] for heading in HEADINGS}


class Stopped(BaseException):
    """A signal asked the process to end; no `except Exception`, nor one of SystemExit, holds it up."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class StdoutClosed(Exception):
    """The reader of stdout has stopped, as `| head` does."""


@contextmanager
def _broken_pipe_raised() -> Iterator[None]:
    """Raise StdoutClosed for a broken pipe, which click would take for a failure or for success."""
    try:
        yield
    except BrokenPipeError as error:
        raise StdoutClosed from error


class Commands(click.Group):
    """The group of all commands, shown in our order, with suggestions for misspelt names."""

    sections = SECTIONS
    context_class = Context

    def make_context(self, *args: Any, **given: Any) -> click.Context:
        with _broken_pipe_raised():  # --help and --version print while the arguments are parsed
            return super().make_context(*args, **given)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:  # as `COMMAND --help`
            args = [*args[1:2], "--help"]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _broken_pipe_raised():
                return super().invoke(ctx)
        except click.UsageError as error:  # click's parser does not say which command it was
            command = self.commands.get(ctx.invoked_subcommand or "")
            if error.ctx is None and command is not None:
                error.ctx = Context(command, info_name=command.name, parent=ctx)
            raise

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # click sorts them

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        params = self.commands[name].params if name in self.commands else []
        if params and rank_of_torchrun()[0] > 0 and "part" not in [each.name for each in params]:
            ctx.exit()  # what has no parts is done by rank 0
        if name in self.commands or name.startswith("-"):
            return super().resolve_command(ctx, args)
        from difflib import get_close_matches

        close = OTHER_NAMES.get(name) or get_close_matches(name, self.commands, cutoff=0.5)
        meant = f"; did you mean {' or '.join(close)}?" if close else ""
        raise click.UsageError(f"there is no command '{name}'{meant}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one table for each section, with the same columns in all."""
        widest = max(map(len, self.commands))
        for title, commands in self.sections.items():
            if commands:
                with formatter.section(title):
                    formatter.write_dl([(f"{each.name:{widest}}", each.summary) for each in commands])


def _show_versions(ctx: click.Context, option: click.Parameter, asked: bool) -> None:
    """Print the versions that a bug report should name, without importing what has them."""
    if not asked or ctx.resilient_parsing:
        return
    click.echo(f"ckpttool {__version__}")
    others = [_installed(name) for name in ("torch", "safetensors", "click")]
    click.echo(f"Python {sys.version.split()[0]}, {', '.join(others)}")
    ctx.exit()


def _installed(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"no {name}"


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EPILOG,
)
@click.option(
    "-V",
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_versions,
    help="Show the versions of this tool and of what it uses.",
)
def group() -> None:
    """A workbench for PyTorch checkpoints.

    Reads .pt files of any age and .safetensors without torch, without loading them, and without running
    anything that they name. Wherever a file stands, a URL may: hf://OWNER/REPO, https://, s3://, gs://, az://.
    """


def _assemble() -> None:
    """Put every command into its section and the group, and give it what others add to it."""
    modules = (keys, convert, *offered("command"), for_programs)  # in this order within a section of the help
    declared = [*chain.from_iterable(vars(module).values() for module in modules)]
    for each in declared:
        if isinstance(each, Command):
            SECTIONS[each.section].append(each)
    for each in chain.from_iterable(SECTIONS.values()):
        group.add_command(each)
        each.add(*(other for other in declared if isinstance(other, Addition) and other.name == each.name))


_assemble()


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
    for number in system.ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup sets that, and a shell in the background
            signal.signal(number, _stop)
    try:
        code = run(sys.argv[1:])
    except Stopped as stopped:
        _end_by(stopped.number, left_by(stopped))
    if "ckpttool.models.factory" in sys.modules:  # code of the user's ran, and may have left work to atexit
        _close_stdout()
        sys.exit(code)
    # Every line was flushed when it was printed. Freeing the objects of a file with very many tensors would
    # take as long as reading it.
    os._exit(code)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; every expected failure is one line, a bug is raised."""
    call = Call(typed=tuple(arguments))
    try:
        if not arguments:
            group(["--help"], prog_name="ckpttool", standalone_mode=False)
            return 2
        return group(arguments, prog_name="ckpttool", standalone_mode=False, obj=call) or 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.Abort, KeyboardInterrupt) as stop:  # not under `main`, which has handlers of its own
        click.echo(f"interrupted{left_by(stop)}", err=True)
        return 130
    except (StdoutClosed, BrokenPipeError):
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


def _stop(number: int, frame: FrameType | None) -> None:
    """Unwind the stack at a signal, so that no half-written file stays."""
    raise Stopped(number)


def _end_by(number: int, goes_on: str) -> NoReturn:
    """End by the signal itself: only then does a shell stop a loop in which this command runs."""
    signal.signal(number, signal.SIG_DFL)
    if number == signal.SIGINT:
        with suppress(OSError):
            click.echo(f"interrupted{goes_on}", err=True)
    system.end_by(number)
    os._exit(128 + number)  # the signal is blocked, or ends no process on this system
