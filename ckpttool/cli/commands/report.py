"""The command `ckpttool report`."""

from __future__ import annotations

from typing import Any

import click

from .. import options
from ..console import Console, counted, printable, show_bytes
from ..reading import fields_of


@click.command("report")
@click.argument("inputs", metavar="FILE [OTHER] OUT.html", nargs=-1, callback=options.part_output)
@options.flag("--no-values", "Do not read values: no ranges, means or histograms, and no search for NaN.")
@options.state_option
@options.no_verify_option
@options.dry_run_option
@options.flag("--force", "Replace OUT.html if it exists.")
@options.reading
def command(
    console: Console, inputs: tuple[str, ...], output: str, no_values: bool, no_verify: bool, **given: Any
) -> None:
    """Write a page to look at: what is in FILE, what differs in OTHER, or how a run's folder was trained.

    One file, which opens anywhere and loads nothing: the modules as a map by bytes and as a tree to fold,
    sort and search, with the range, mean and histogram of each tensor; the optimizer and everything else.
    With OTHER, what changed and how far. Of a run's folder: curves, where the time goes, evaluations.

    \b
    Examples:
      ckpttool report last.pt last.html
      ckpttool report base.safetensors tuned.safetensors changes.html
      ckpttool report runs/a run.html
    """
    from ...reporting.report import report

    if len(inputs) > 2:
        raise click.UsageError("report takes FILE, at most one OTHER, and the page to write")
    file, other = inputs[0], inputs[1] if len(inputs) > 1 else None
    with console.bar("reading") as bar:
        found = report(file, output, other, values=not no_values, verify=not no_verify, **given, **bar.calls)
    shown = [counted(len(found.checkpoints), "checkpoint")] if found.checkpoints else []
    shown += [counted(len(found.runs), "run")] if found.runs else []
    verb = "would have written" if given["dry_run"] else "wrote"
    line = f"{verb} a page about {' and '.join(shown)} -> {printable(output)} ({show_bytes(found.nbytes)})"
    dry = {"dry_run": True} if given["dry_run"] else {}
    console.result(console.sentence(line), {**fields_of(found), **dry})
