"""How a command talks: results as text or JSON, notes, progress bars.

Data goes to stdout; progress, notes, hints and errors go to stderr.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ..contract import finite, versioned
from ..words import counted as counted
from ..words import printable as printable
from ..words import show_bytes as show_bytes
from ..words import show_names as show_names
from .layout import columns, terminal_width, wrapped

if TYPE_CHECKING:
    from ..files.pieces import Progress
    from ..remote.store import Traffic

BAR_FROM = 64 << 20  # bytes of work from which a progress bar is drawn
MAX_INDENTED = 1 << 20  # characters of JSON up to which it is indented


@dataclass(frozen=True, slots=True)
class Console:
    """How one command talks, by its options."""

    json: bool = False  # print one JSON object on stdout and nothing else there
    quiet: bool = False  # print nothing but errors
    verbose: bool = False  # print every name instead of the first few
    to_stderr: bool = False  # print results on stderr, because the output file goes to stdout
    # What this process had asked of remote stores before the command
    asked_before: tuple[int, int] = field(default_factory=lambda: _asked())

    def result(self, text: str, data: Mapping[str, object], *, in_quiet: str | None = None) -> None:
        """Print the outcome."""
        requests, nbytes = (now - before for now, before in zip(_asked(), self.asked_before, strict=True))
        if requests:
            data = {**data, "requests": requests, "bytes_read": nbytes}
            for remark in _remarks():
                self.note(remark)
            if self.verbose:
                self.note(f"{counted(requests, 'request')}, {show_bytes(nbytes)} read")
        said = to_json(versioned(data)) if self.json else in_quiet if self.quiet else text
        if said is not None:
            click.echo(said, err=self.to_stderr)

    def sentence(self, text: str) -> str:
        """Return an outcome of one line, which a terminal gets in lines that end between words."""
        width = terminal_width(sys.stderr if self.to_stderr else sys.stdout)
        return text if width is None else "\n".join(wrapped(text, width, whole_words=True))

    def listed(self, text: str, items: Sequence[Mapping[str, object]]) -> None:
        """Print an outcome that is a list in JSON."""
        if not self.quiet or self.json:
            said = json.dumps([*map(versioned, items)], indent=2) if self.json else text
            click.echo(said, err=self.to_stderr)

    def note(self, text: str, *, pasted: bool = False) -> None:
        """Print something worth knowing about the result, on stderr."""
        if not (self.quiet or self.json):
            width = None if pasted else terminal_width(sys.stderr)
            with suppress(OSError):  # a note that can't be printed does not fail the command
                click.echo(
                    text if width is None else "\n".join(wrapped(text, width, whole_words=True)), err=True
                )

    def names(self, names: Sequence[str]) -> str:
        """Join the first few names, or with -v all of them."""
        return ", ".join(map(printable, names)) if self.verbose else show_names(names)

    def note_names(self, said: str, names: Sequence[str]) -> None:
        """Note names, if there are any, after what is said of them."""
        if names:
            self.note(f"{said}: {self.names(names)}")

    @contextmanager
    def progress(self, total: int, label: str) -> Iterator[Progress | None]:
        """Draw a bar of bytes on stderr while the block runs; yield what to call after each piece."""
        with self.bar(label) as bar:
            bar.expect(total)
            yield bar.calls.get("progress")

    @contextmanager
    def bar(self, label: str) -> Iterator[ProgressBar]:
        """Yield a progress bar, drawn until the block ends: on a terminal, and not with -q or --json."""
        bar = ProgressBar(label, drawn=not (self.quiet or self.json) and sys.stderr.isatty())
        try:
            yield bar
        finally:
            bar.close()


def _traffic() -> Traffic | None:
    """Return the count of what was asked of remote stores, if their code was needed."""
    store = sys.modules.get(f"{__package__.rpartition('.')[0]}.remote.store")
    return None if store is None else store.TRAFFIC


def _asked() -> tuple[int, int]:
    """Return how many requests were made in this process, and how many bytes came."""
    return (traffic.requests, traffic.nbytes) if (traffic := _traffic()) else (0, 0)


def _remarks() -> list[str]:
    """Return what is to be said of the stores that were asked, once."""
    return traffic.taken() if (traffic := _traffic()) else []


class ProgressBar:
    """A progress bar on stderr, of bytes or of steps, from when their number is known."""

    def __init__(self, label: str, *, drawn: bool) -> None:
        self._label, self._drawn = label, drawn
        self._shown: Any = None

    @property
    def calls(self) -> dict[str, Any]:
        """What takes the progress of a work of bytes, by the names of arguments; {} if nothing is drawn."""
        return {"progress": self.add, "expect": self.expect} if self._drawn else {}

    def _draw(self, total: int, **units: Any) -> None:
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # no thread to watch the bar
        self._shown = tqdm(total=total, desc=self._label, leave=False, **units)

    def expect(self, total: int) -> None:
        """Draw the bar for a work of about `total` bytes, if that is worth a bar."""
        self.close()  # what was written before an upload has a bar of its own
        if self._drawn and total >= BAR_FROM:
            self._draw(total, unit="B", unit_scale=True)

    def add(self, count: int) -> None:
        """Count more bytes as done."""
        if self._shown is not None:  # tqdm drops the bar when it goes past its total
            self._shown.update(min(count, self._shown.total - self._shown.n))

    def step(self, done: int, of: int) -> None:
        """Draw how many steps are done, of how many."""
        if self._drawn and self._shown is None:
            self._draw(of, unit="step")
        self.add(done - (self._shown.n if self._shown else 0))

    def close(self) -> None:
        """Erase the bar."""
        if self._shown is not None:
            self._shown.close()
            self._shown = None


def to_json(data: Mapping[str, object]) -> str:
    """Return `data` as strict JSON: NaN and infinity become strings, lone surrogates are escaped."""
    # More than MAX_INDENTED characters get one line per field: json indents ten times as slowly.
    dumps = partial(json.dumps, allow_nan=False)
    try:
        fields = {key: dumps(value) for key, value in data.items()}
    except (TypeError, ValueError):
        fields = {key: dumps(finite(value, str)) for key, value in data.items()}
    if sum(map(len, fields.values())) > MAX_INDENTED:
        return "{\n" + ",\n".join(f"  {dumps(key)}: {text}" for key, text in fields.items()) + "\n}"
    return dumps(finite(data, str), indent=2)


def coloured(word: str, colour: str) -> str:
    """Colour `word`, unless NO_COLOR (https://no-color.org) is set. click strips it outside of terminals."""
    return word if os.environ.get("NO_COLOR") else click.style(word, fg=colour, bold=True)


def say(label: str, colour: str, text: str, *, command: re.Pattern[str] | None = None) -> None:
    """Print text on stderr, behind a coloured label.

    A terminal gets it in lines that end between words, and what `command` finds whole, on a line of its own.
    """
    whole, width = f"{label} {text}", terminal_width(sys.stderr)
    lines = [whole]
    if width is not None and columns(whole) > width:
        found = command and command.search(whole)
        lines = wrapped(whole[: found.start()] if found else whole, width, whole_words=True)
        lines += [found[0]] if found else []
    click.echo("\n".join(lines).replace(label, coloured(label, colour), 1), err=True)


@contextmanager
def stdout_kept_for_results() -> Iterator[None]:
    """Send to stderr what the user's own code prints meanwhile: stdout is for JSON, or a script for sh."""
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)  # prints of C libraries and of child processes too
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
