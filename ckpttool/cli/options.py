"""Arguments and options that several commands share, each defined once."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any, TypeVar

import click

from ..errors import UsageFault
from .console import Console

F = TypeVar("F", bound=Callable[..., Any])


def _streamed(ctx: click.Context, argument: click.Parameter, output: str) -> str:
    """Record for the report of an error that stdout is the output file."""
    if isinstance(ctx.obj, dict):
        ctx.obj["to_stderr"] = output == "-"
    return output


input_argument = click.argument("input", metavar="INPUT", type=click.Path(allow_dash=True))
output_argument = click.argument(
    "output", metavar="OUTPUT", type=click.Path(allow_dash=True), callback=_streamed
)
file_argument = click.argument("file", metavar="FILE", type=click.Path(allow_dash=True))

state_option = click.option(
    "--state",
    metavar="WHERE",
    help="Which state to use if the file holds several, dotted for nesting, e.g. model.ema.",
)
model_option = click.option(
    "--model",
    required=True,
    metavar="SPEC",
    help="The model: torchvision:resnet18, file.py:factory or pkg.mod:factory(n=10). Its code is run.",
)
force_option = click.option("--force", is_flag=True, help="Replace OUTPUT if it exists.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Say what would be written, but write nothing.")
verify_option = click.option(
    "--verify",
    is_flag=True,
    help="Compare bytes read with their checksums, and values written with those read.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout, also for errors."
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print only errors.")
verbose_option = click.option(
    "-v", "--verbose", is_flag=True, help="Show every name, not only the first few."
)


MORE_FILES = {"allow_extra_args": True}
"""Settings of a command whose `require_one_file` answers a second file, instead of click."""


def require_one_file(file: str) -> None:
    """Refuse a second file.

    Raises:
        UsageFault: there is one; the hint is the command that compares the two.
    """
    if more := click.get_current_context().args:
        words = ["ckpttool", "verify", file, "--against", more[0]]
        raise UsageFault(f"takes one FILE, and got '{more[0]}' too", hint=f"to compare: {shlex.join(words)}")


def _all(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


reading = _all(json_option, quiet_option, verbose_option)
"""The options of every command."""

writing = _all(
    input_argument, output_argument, state_option, verify_option, dry_run_option, force_option, reading
)
"""The arguments and options of every command that writes one file from another."""


def console(options: dict[str, Any]) -> Console:
    """Return the console that a command's options ask for."""
    return Console(
        json=options.get("as_json", False),
        quiet=options.get("quiet", False),
        verbose=options.get("verbose", False),
        to_stderr=options.get("output") == "-",
    )
