"""The command line, one file a command: parses, calls the library, prints. Only this folder knows click."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any, NoReturn

import click

from .. import __version__
from . import (
    add_prefix,
    average,
    convert,
    convert_batchnorm,
    diff,
    digest,
    doctor,
    gather_metrics,
    inspect,
    optimizer,
    reload,
    rename_keys,
    slim,
    strip_prefix,
    verify,
)
from .console import fail

EPILOG = """\
\b
Exit codes: 0 done, or same; 1 differs, a check failed or nothing to do;
2 usage; 3 unreadable, damaged or refused.
`ckpttool COMMAND --help` ends in an example. Completion of commands, options
and files: eval "$(_CKPTTOOL_COMPLETE=bash_source ckpttool)", or zsh_source.
"""

SECTIONS: dict[str, dict[ModuleType, str]] = {
    "Look": {
        inspect: "Show what is in a file, without running any of it",
        digest: "One SHA-256 for a model, the same in every format",
    },
    "Rename": {
        strip_prefix: "Take a wrapper's prefix off the keys",
        add_prefix: "Put a wrapper's prefix before every key",
        rename_keys: "Rename keys by regular expressions",
    },
    "Convert": {
        convert: "Write another format, or other element types",
        slim: "Write only the model's state, without unused bytes",
        convert_batchnorm: "BatchNorm to SyncBatchNorm and back; pool ranks",
    },
    "Train on": {
        average: "The mean of several checkpoints, rounded once",
        optimizer: "Optimizer state by name or index, or for another order",
    },
    "Check": {
        diff: "What differs between two files, by name and value",
        verify: "Read every byte: structure, checksums, NaN, infinity",
        gather_metrics: "Exact metrics from one prediction file per rank",
    },
    "Load": {
        doctor: "Why it does not load, and the commands that fix it",
        reload: "Load strictly into a plain model, in one process",
    },
}
"""Every command, in the order and with the line in which `ckpttool --help` shows it."""


class ReaderGone(Exception):
    """The reader of our output has stopped (`| head`)."""


@contextmanager
def _reader_watched() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderGone from error


class Commands(click.Group):
    """The group of all commands. click itself would take a broken pipe for success."""

    def make_context(self, *args: Any, **given: Any) -> click.Context:
        with _reader_watched():  # --help and --version print while the words are looked at
            return super().make_context(*args, **given)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _reader_watched():
                return super().invoke(ctx)
        except click.UsageError as error:  # click's parser does not say of which command
            command = self.commands.get(ctx.invoked_subcommand or "")
            if error.ctx is None and command is not None:
                error.ctx = click.Context(command, info_name=command.name, parent=ctx)
            raise

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in our order; click sorts them

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in self.commands or name.startswith("-"):
            return super().resolve_command(ctx, args)
        raise click.UsageError(f"there is no command '{name}'{_meant(name, self.commands)}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table above, in columns that are the same for all sections."""
        widest = max(map(len, self.commands))
        for title, modules in SECTIONS.items():
            with formatter.section(title):
                rows = [(f"{module.command.name:{widest}}", line) for module, line in modules.items()]
                formatter.write_dl(rows)


def _meant(name: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, known, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _show_versions(ctx: click.Context, option: click.Parameter, asked: bool) -> None:
    """Ours, and those that a report of a fault should name; nothing is imported to know them."""
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
    anything that they name.
    """


for section in SECTIONS.values():
    for module in section:
        group.add_command(module.command)


def main() -> NoReturn:
    """The entry point: runs a command, turns every expected failure into one line, ends with an exit code."""
    gc.disable()  # a command is over before garbage in cycles could matter, and a search visits every tensor
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's would wait busily for products of matrices
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
    # All was flushed when it was said. Nothing is taken down: of a file with very many tensors that would
    # take as long as reading it.
    os._exit(code)


def run(arguments: list[str]) -> int:
    known: dict[str, bool] = {}  # what the options have said when something goes wrong
    try:
        if not arguments:
            group(["--help"], prog_name="ckpttool", standalone_mode=False)
            return 2
        return group(arguments, prog_name="ckpttool", standalone_mode=False, obj=known) or 0
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
        return fail(error, as_json="--json" in arguments, to_stderr=known.get("to_stderr", False))


def _terminate(signum: int, frame: FrameType | None) -> None:
    """SIGTERM and SIGHUP unwind the stack, so that no half-written file stays behind."""
    sys.exit(128 + signum)
