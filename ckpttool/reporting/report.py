"""`report`: a page of HTML about a checkpoint, about what differs between two, or about a training run.

The template, the script, the style and the data are in one file that asks for nothing. Text of checkpoints is
only in a block of JSON, in which no `<` is left, and the script shows it as text. The policy lets the browser
run this script and this style, by their hashes, and load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, NamedTuple

from .. import __version__
from ..core.checkpoint.checkpoint import Checkpoint
from ..core.files.commit import naming
from ..core.files.threads import Progress
from ..core.formats.output import OutputPlace
from ..core.formats.reading import File
from ..core.formats.reading import open as open_checkpoint
from ..core.words import finite, printable
from ..diffing.compare import diff
from ..errors import SeveralCheckpoints, Unreadable, UsageFault
from ..inspecting.summary import summarize
from ..inspecting.tables import BINS, CheckpointRow, checkpoint_rows, measure_all
from .contents import checkpoint_row, contents, difference
from .training import evaluation, evaluations_in, is_run, training

# In the order in which each needs those before it
SCRIPTS = ("elements", "names", "tables", "treemap", "tree", "changes", "charts", "page")


@dataclass(frozen=True, slots=True)
class Reported:
    """A page that was written.

    Attributes:
        path: the page.
        nbytes: its size.
        checkpoints: the files it is about.
        runs: the folders of training runs that it is about.
        same: whether two checkpoints hold the same; None where there is one.
    """

    path: str = field(metadata={"json": "output"})
    nbytes: int = field(metadata={"json": "bytes"})
    checkpoints: tuple[str, ...]
    runs: tuple[str, ...]
    same: bool | None = None


def report(
    file: File,
    path: str | os.PathLike[str],
    other: File | None = None,
    *,
    values: bool = True,
    state: str | None = None,
    verify: bool = True,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    expect: Progress | None = None,
) -> Reported:
    """Write a page of HTML about a checkpoint, and what differs from another; or about a training run.

    The page is one file. It asks for nothing, and runs nothing but its own script. Of a run's folder it shows
    curves, evaluations and the newest checkpoint that is whole.

    Args:
        file: a path, an open checkpoint, or the folder of a run.
        path: the page to write; `-` is standard output.
        other: what to compare with, as `diff` does; of a run, another run.
        values: read all values, for the range, mean and histogram of each tensor.
        state: dotted path of the model's state; found when None.
        verify: compare what is read with the checksums that the files state.
        force: replace an existing page.
        dry_run: make the page, and write nothing.
        progress, expect: called with numbers of bytes: those read, and before how many there will be.

    Returns:
        What was written: `.path`, `.nbytes`, `.checkpoints`, `.runs`, `.same`.

    Raises:
        UsageFault: the page's name does not end in `.html`.
        OutputExists: there is something at `path`, and `force` is not set, or it is one of the inputs.
        NoState: there is no model's state at `state`.
        Unreadable, Damaged, Unsupported: as `ckpttool.open` and `ckpttool.diff` raise them; also for a run's
            log or evaluation.

    Example:
        >>> found = ckpttool.report("model.safetensors", "changes.html", "tuned.safetensors")
        >>> found.same, found.checkpoints
        (False, ('model.safetensors', 'tuned.safetensors'))
    """
    output = os.fspath(path)
    place = page_place(output, (file, other), force)
    data: dict[str, Any] = {}
    comparison = None
    with ExitStack() as stack:
        subjects = [_subject(stack, each) for each in (file, other) if each is not None]
        checkpoints = [each.checkpoint for each in subjects if each.checkpoint is not None]
        if checkpoints:
            first = checkpoints[0]
            if expect:
                expect(first.nbytes * (values + (len(checkpoints) > 1)))
            stats = measure_all(first, bins=BINS, verify=verify, progress=progress) if values else {}
            data["checkpoint"] = contents(first, summarize(first, state), stats)
            if len(checkpoints) > 1:
                comparison = diff(*checkpoints, state=state, verify=verify, progress=progress)
                data["difference"] = difference(first, checkpoints[1], comparison, state)
        if runs := [each.run for each in subjects if each.run is not None]:
            data["training"] = training(runs)
            data["evaluations"] = [evaluation(at) for run in runs for at in evaluations_in(run)]
        data["rows"] = [checkpoint_row(row) for each in subjects for row in each.rows]
        names = tuple(each.path for each in checkpoints)
        written = write(place, tuple(runs) or names, data, dry_run=dry_run)
    return Reported(output, written, names, tuple(runs), None if comparison is None else comparison.same)


def write(
    place: OutputPlace, about: tuple[str, ...], data: Mapping[str, Any], *, dry_run: bool = False
) -> int:
    """Write a page, whole or not at all, and return its size in bytes."""
    title = " and ".join(printable(os.path.basename(os.path.normpath(each))) for each in about)
    made = page(f"{title} · ckpttool", {"version": __version__, "title": title, **data})
    if not dry_run:
        with naming(place.path), place.file() as file:
            file.write(made)
    return len(made)


def page_place(path: str, inputs: tuple[File | None, ...], force: bool) -> OutputPlace:
    """Return where a page is written: `-`, or a file that may be replaced by `force` and is no input.

    Raises UsageFault for another ending, OutputExists for what may not be replaced.
    """
    if path != "-" and ("://" in path or not path.lower().endswith((".html", ".htm"))):
        what = "is a URL, and the page is written to a file" if "://" in path else "is not the name of a page"
        raise UsageFault(f"{path}: {what}", hint="the last argument is the page to write, e.g. report.html")
    place = OutputPlace(path, force, [each for each in inputs if each is not None])
    place.require()
    return place


class _Subject(NamedTuple):
    """What a page is about."""

    checkpoint: Checkpoint | None
    run: str | None = None
    rows: tuple[CheckpointRow, ...] = ()


def _subject(stack: ExitStack, file: File) -> _Subject:
    if isinstance(file, Checkpoint):
        return _Subject(file)
    path = os.fspath(file)
    run = path if is_run(path) else None
    try:
        return _Subject(stack.enter_context(open_checkpoint(path)), run)
    except SeveralCheckpoints:
        apart = {os.path.normpath(folder) for folder in evaluations_in(path)}
        rows = tuple(row for row in checkpoint_rows(path) if os.path.normpath(row.path) not in apart)
        whole = next((row.path for row in rows if not row.problem), None)
        if whole is None and run is None:
            raise
        checkpoint = None if whole is None else stack.enter_context(open_checkpoint(whole))
        return _Subject(checkpoint, run, rows)
    except Unreadable:
        if run is None:
            raise
        return _Subject(None, run)


# ---- The page


def page(title: str, data: Mapping[str, Any]) -> bytes:
    """Return a page of `data`: JSON values, whose texts are `printable`; NaN and infinity become null."""
    style, script = _text("page.css"), "".join(_text(f"{name}.js") for name in SCRIPTS)
    text = json.dumps(finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    block = text.replace("<", "\\u003c")  # so that nothing in it can end the block of HTML
    hashes = {"style_hash": _hash(style), "script_hash": _hash(script)}
    template, texts = Template(_text("page.html")), {"style": style, "script": script, **hashes}
    return template.substitute(title=escape(title), data=block, **texts).encode()


def _text(name: str) -> str:
    return files(__package__).joinpath("web").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
