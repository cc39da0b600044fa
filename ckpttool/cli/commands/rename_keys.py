"""The command `ckpttool rename-keys`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from .. import options
from ..rewriting import Outcome, renaming_outcome, rewrite

if TYPE_CHECKING:
    from ...checkpoint.checkpoint import Checkpoint


@click.command("rename-keys")
@click.option(
    "--map",
    "rules",
    multiple=True,
    required=True,
    metavar="REGEX=REPLACEMENT",
    help="What to rename, as re.sub does. Repeatable; applied in order.",
)
@options.writing
def command(rules: tuple[str, ...], **given: Any) -> None:
    """Rename keys by regular expressions.

    Two keys that would get the same name are refused; module versions and the optimizer's parameter names
    follow.

    \b
    Example:
      ckpttool rename-keys model.pt renamed.pt --map '^backbone\\.=model.'
    """
    from ...transforms.keys import rename_keys

    pairs = [_pair(rule) for rule in rules]

    def transform(checkpoint: Checkpoint) -> tuple[Checkpoint, Outcome]:
        new, renaming = rename_keys(checkpoint, pairs, state=given["state"])
        return new, renaming_outcome("renamed", renaming)

    rewrite(given, transform)


def _pair(rule: str) -> tuple[str, str]:
    """Split a rule at the first = before which the expression compiles, as `(?=a)b=c` has two."""
    reason = ""
    for equals in re.finditer("=", rule):
        expression, replacement = rule[: equals.start()], rule[equals.end() :]
        fault = _fault(expression) if expression else "the expression is empty"
        if fault is None:
            return expression, replacement
        reason = reason or f": {fault}"
    raise click.BadParameter(f"'{rule}' is not REGEX=REPLACEMENT{reason}", param_hint="--map")


def _fault(expression: str) -> str | None:
    """Return why `expression` is not a regular expression; None if it is one."""
    try:
        re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return None
