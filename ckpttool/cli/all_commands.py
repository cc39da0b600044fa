"""All commands, in the order and with the lines of `ckpttool --help`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import click

from .. import __version__
from .commands import (
    add_prefix,
    average,
    convert,
    convert_batchnorm,
    diff,
    digest,
    disarm,
    doctor,
    gather_metrics,
    inspect,
    merge,
    merge_lora,
    optimizer,
    prove,
    reload,
    rename_keys,
    slim,
    split,
    strip_prefix,
    verify,
)

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
        merge: "Write what many ranks wrote as one checkpoint",
        split: "One checkpoint for the ranks of a training",
        slim: "Write only the model's state, without unused bytes",
        disarm: "Plain values for objects, as weights_only wants",
        convert_batchnorm: "BatchNorm to SyncBatchNorm and back; pool ranks",
    },
    "Train on": {
        merge_lora: "Add a LoRA adapter to its base model",
        average: "The mean of several checkpoints, rounded once",
        optimizer: "Optimizer state by name or index, or for another order",
    },
    "Check": {
        diff: "What differs between two files, by name and value",
        verify: "Read every byte: structure, checksums, NaN, infinity",
        prove: "Whether a training run's record holds, bit for bit",
        gather_metrics: "Exact metrics from one prediction file per rank",
    },
    "Load": {
        doctor: "Why it does not load, and the commands that fix it",
        reload: "Load strictly into a plain model, in one process",
    },
}
"""The modules of the commands by section, each with its line of help."""


class ReaderGone(Exception):
    """The reader of stdout has stopped, as `| head` does."""


@contextmanager
def _broken_pipe_raised() -> Iterator[None]:
    """Raise ReaderGone for a broken pipe, which click would take for a failure or for success."""
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderGone from error


class Commands(click.Group):
    """The group of all commands, shown in our order, with suggestions for misspelt names."""

    def make_context(self, *args: Any, **given: Any) -> click.Context:
        with _broken_pipe_raised():  # --help and --version print while the arguments are parsed
            return super().make_context(*args, **given)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _broken_pipe_raised():
                return super().invoke(ctx)
        except click.UsageError as error:  # click's parser does not say which command it was
            command = self.commands.get(ctx.invoked_subcommand or "")
            if error.ctx is None and command is not None:
                error.ctx = click.Context(command, info_name=command.name, parent=ctx)
            raise

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # click sorts them

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in self.commands or name.startswith("-"):
            return super().resolve_command(ctx, args)
        raise click.UsageError(f"there is no command '{name}'{_suggestion(name, self.commands)}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one table for each section, with the same columns in all."""
        widest = max(map(len, self.commands))
        for title, modules in SECTIONS.items():
            with formatter.section(title):
                rows = [(f"{module.command.name:{widest}}", line) for module, line in modules.items()]
                formatter.write_dl(rows)


def _suggestion(name: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, known, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


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
