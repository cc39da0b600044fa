"""Pages of HTML: the command `report`, and --html of `inspect` and `diff`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import click

from ..core.cli import options
from ..core.cli.console import Console, counted, printable, show_bytes
from ..core.cli.reading import fields_of
from ..core.cli.schemas import Fields, fields_like

if TYPE_CHECKING:
    from ..core.checkpoint.checkpoint import Checkpoint
    from ..diffing.compare_values import Comparison
    from ..inspecting.summary import Summary
    from ..inspecting.tables import Stats

html_option = options.option(
    "--html OUT", "Also write it as a page of HTML, as report does.", "html", callback=options.note_output
)
force_option = options.flag("--force", "Replace the file of --html if it exists.")

Page = Callable[..., None]  # writes it, once the command knows what it is about


def _printed() -> Fields:
    from .report import Reported

    return {**fields_like(Reported), "dry_run?": (Literal[True], "nothing was written")}


@options.command("Look", "A page to look at: contents, changes, or a run", _printed)
@click.argument("inputs", metavar="FILE [OTHER] OUT.html", nargs=-1, callback=options.part_output)
@options.flag("--no-values", "Do not read values: no ranges, means or histograms, and no search for NaN.")
@options.state_option
@options.no_verify_option
@options.dry_run_option
@options.flag("--force", "Replace OUT.html if it exists.")
@options.reading
def report(
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
    from . import report as pages

    if len(inputs) > 2:
        raise click.UsageError("report takes FILE, at most one OTHER, and the page to write")
    file, other = inputs[0], inputs[1] if len(inputs) > 1 else None
    with console.bar("reading") as bar:
        found = pages.report(
            file, output, other, values=not no_values, verify=not no_verify, **given, **bar.calls
        )
    shown = [counted(len(found.checkpoints), "checkpoint")] if found.checkpoints else []
    shown += [counted(len(found.runs), "run")] if found.runs else []
    verb = "would have written" if given["dry_run"] else "wrote"
    line = f"{verb} a page about {' and '.join(shown)} -> {printable(output)} ({show_bytes(found.nbytes)})"
    dry = {"dry_run": True} if given["dry_run"] else {}
    console.result(console.sentence(line), {**fields_of(found), **dry})


@options.adds_to("inspect", behind="no_verify")
@html_option
@force_option
def inspect_page(console: Console, *files: str, html: str | None, force: bool) -> Page | None:
    """Check the place of --html, and return what writes the page of a summary."""
    if html is not None and len(files) > 1:
        raise click.UsageError(f"--html {html}: a page is of one FILE")

    def about(checkpoint: Checkpoint, summary: Summary, stats: Mapping[str, Stats | None]) -> dict[str, Any]:
        from .contents import contents

        return {"checkpoint": contents(checkpoint, summary, stats)}

    return _page(console, files, html, force, about)


@options.adds_to("diff", behind="no_verify")
@html_option
@force_option
def diff_page(console: Console, *files: str, html: str | None, force: bool) -> Page | None:
    """Check the place of --html, and return what writes the page of a comparison."""

    def about(a: Checkpoint, b: Checkpoint, comparison: Comparison, state: str | None) -> dict[str, Any]:
        from ..inspecting.summary import summarize
        from .contents import contents, difference

        first = contents(a, summarize(a, state), {})
        return {"checkpoint": first, "difference": difference(a, b, comparison, state)}

    return _page(console, files, html, force, about)


def _page(
    console: Console, files: tuple[str, ...], html: str | None, force: bool, about: Callable[..., Any]
) -> Page | None:
    if html is None:
        return None
    from .report import page_place, write

    place = page_place(html, files, force)

    def write_page(*found: Any) -> None:
        write(place, files, about(*found))
        console.note(f"page -> {printable(place.path)}")

    return write_page
