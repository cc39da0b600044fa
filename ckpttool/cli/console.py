"""How a command talks: to a terminal, in JSON, and by its exit code.

Data goes to stdout; progress, notes, hints and errors go to stderr.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import click

from ..errors import Mismatch
from ..files.copying import Progress
from .columns import wrapped

if TYPE_CHECKING:
    from ..models.diagnosis.fit import Fit

BAR_FROM = 64 << 20
"""Bytes of work from which a progress bar is drawn."""

MAX_INDENTED = 1 << 20
"""Characters of JSON up to which it is indented."""


@dataclass(frozen=True, slots=True)
class Console:
    """How one command talks, by its options.

    Attributes:
        json: print one JSON object on stdout and nothing else there.
        quiet: print nothing but errors.
        verbose: print every name instead of the first few.
        to_stderr: print results on stderr, because the output file goes to stdout.
    """

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    to_stderr: bool = False

    def result(self, text: str, data: Mapping[str, object], *, in_quiet: str | None = None) -> None:
        """Print the outcome.

        Args:
            text: the outcome for people.
            data: the outcome for scripts, printed as JSON.
            in_quiet: what -q leaves of `text`; None leaves nothing.
        """
        said = to_json(data) if self.json else in_quiet if self.quiet else text
        if said is not None:
            click.echo(said, err=self.to_stderr)

    def note(self, text: str, *, pasted: bool = False) -> None:
        """Print something worth knowing beside the result, on stderr.

        Args:
            text: what to say; a terminal gets it wrapped to its width.
            pasted: do not wrap, because `text` holds a command to paste.
        """
        if not (self.quiet or self.json):
            width = None if pasted else terminal_width(sys.stderr)
            lines = [text] if width is None else wrapped(text, width)
            with suppress(OSError):  # a note that can't be printed does not fail the command
                click.echo("\n".join(lines), err=True)

    def names(self, names: Sequence[str]) -> str:
        """Join the first few names, or with -v all of them."""
        return show_names(names, len(names) if self.verbose else 4)

    @property
    def draws(self) -> bool:
        """Whether a progress bar is drawn: on a terminal, and not with -q or --json."""
        return not (self.quiet or self.json) and sys.stderr.isatty()

    @contextmanager
    def progress(self, total: int, label: str) -> Iterator[Progress | None]:
        """Draw a bar of bytes on stderr while the block runs; yield what to call after each piece.

        Args:
            total: bytes of the whole work; an estimate is enough.
            label: what is done with them, e.g. "reading".
        """
        with self.bar(label) as bar:
            if self.draws:
                bar.expect(total)
            yield bar.add if self.draws else None

    @contextmanager
    def bar(self, label: str) -> Iterator[Bar]:
        """Yield a bar of bytes, drawn on stderr from its `expect` on until the block ends."""
        bar = Bar(label)
        try:
            yield bar
        finally:
            bar.close()


class Bar:
    """A progress bar of bytes."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._shown: Any = None

    def expect(self, total: int) -> None:
        """Draw the bar for a work of about `total` bytes, if that is worth a bar."""
        if total < BAR_FROM:
            return
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # no thread to watch the bar
        self._shown = tqdm(total=total, desc=self._label, unit="B", unit_scale=True, leave=False)

    def add(self, count: int) -> None:
        """Count more bytes as done."""
        if self._shown is not None:  # tqdm drops the bar when it goes past its total
            self._shown.update(min(count, self._shown.total - self._shown.n))

    def close(self) -> None:
        """Erase the bar."""
        if self._shown is not None:
            self._shown.close()


def terminal_width(stream: TextIO) -> int | None:
    """Return the columns of the terminal that `stream` is; None if it is none."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def to_json(data: Mapping[str, object]) -> str:
    """Return `data` as strict JSON: NaN and infinity become strings, lone surrogates are escaped.

    More than MAX_INDENTED characters get one line per field, because json indents ten times as slowly.
    """
    try:
        fields = {key: json.dumps(value, allow_nan=False) for key, value in data.items()}
    except (TypeError, ValueError):
        data = {key: _finite(value) for key, value in data.items()}
        fields = {key: json.dumps(value, allow_nan=False) for key, value in data.items()}
    if sum(map(len, fields.values())) > MAX_INDENTED:
        return "{\n" + ",\n".join(f"  {json.dumps(key)}: {text}" for key, text in fields.items()) + "\n}"
    return json.dumps(_finite(data), indent=2, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def printable(text: str) -> str:
    """Return `text` with control characters and lone surrogates escaped, fit for a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def show_bytes(count: float) -> str:
    """Return a number of bytes for people, in units of 1000: `97.8 MB`."""
    if count < 1000:
        return f"{count:.0f} bytes"
    units = ["kB", "MB", "GB", "TB"]
    while (count := count / 1000) >= 999.5 and len(units) > 1:
        del units[0]
    return f"{count:.3g} {units[0]}"


def counted(count: int, one: str, more: str) -> str:
    """Return a count with its noun: `1 value`, `2 values`."""
    return f"{count} {one if count == 1 else more}"


def show_names(names: Sequence[str], most: int = 4) -> str:
    """Join the first `most` names, and say how many more there are."""
    shown = ", ".join(printable(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def coloured(word: str, colour: str) -> str:
    """Colour `word`, unless NO_COLOR (https://no-color.org) is set. click strips it outside of terminals."""
    return word if os.environ.get("NO_COLOR") else click.style(word, fg=colour, bold=True)


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


def mismatch_fields(error: Mismatch | Fit) -> dict[str, object]:
    """Return the JSON fields that name the keys in which a state and a model differ."""
    return {
        "missing": error.missing,
        "unexpected": error.unexpected,
        "mismatched": [{"name": n, "file": theirs, "model": mine} for n, theirs, mine in error.mismatched],
    }
