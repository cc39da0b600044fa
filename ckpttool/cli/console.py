"""What a command says, and how: the one place that knows about terminals, JSON and exit codes.

Data goes to stdout; progress, hints and errors go to stderr.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import click

from ..errors import CkptToolError, Mismatch
from ..files.copying import Progress
from .columns import wrapped

if TYPE_CHECKING:
    from ..models.diagnosis.fit import Fit

BAR_FROM = 64 << 20
"""Bytes from which a progress bar is worth drawing."""

MAX_INDENTED = 1 << 20
"""Characters of JSON that are laid out for the eye."""


@dataclass(frozen=True, slots=True)
class Console:
    """How one command talks.

    Attributes:
        json: one JSON object on stdout and nothing else there.
        quiet: nothing but errors.
        verbose: every name, where else the first few are said.
        to_stderr: the output file itself goes to stdout, so words must not.
    """

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    to_stderr: bool = False

    def result(self, text: str, data: Mapping[str, object]) -> None:
        """The outcome: words for people, or the object for scripts."""
        if self.json:
            click.echo(to_json(data), err=self.to_stderr)
        elif not self.quiet:
            click.echo(text, err=self.to_stderr)

    def note(self, text: str, *, pasted: bool = False) -> None:
        """Something worth knowing beside the result.

        Args:
            pasted: holds a command, which has to stay on one line.
        """
        if not (self.quiet or self.json):
            width = None if pasted else terminal_width(sys.stderr)
            lines = [text] if width is None else wrapped(text, width)
            with suppress(OSError):  # what is noted decides nothing
                click.echo("\n".join(lines), err=True)

    def names(self, names: Sequence[str]) -> str:
        """Names in a row: the first few, or with -v all of them."""
        return show_names(names, len(names) if self.verbose else 4)

    @property
    def draws(self) -> bool:
        """Whether there is a terminal to draw a bar on."""
        return not (self.quiet or self.json) and sys.stderr.isatty()

    @contextmanager
    def progress(self, total: int, label: str) -> Iterator[Progress | None]:
        """A byte bar on stderr, on a terminal only; gives what to call after each piece.

        Args:
            total: bytes of the work, or about so many.
        """
        with self.bar(label) as bar:
            if self.draws:
                bar.expect(total)
            yield bar.add if self.draws else None

    @contextmanager
    def bar(self, label: str) -> Iterator[Bar]:
        """A byte bar on stderr, drawn once it is told how much there is to do."""
        bar = Bar(label)
        try:
            yield bar
        finally:
            bar.close()


class Bar:
    """How much of the bytes of a work is done."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._shown: Any = None

    def expect(self, total: int) -> None:
        """Draws it, if there is enough to do: so many bytes, or about so many."""
        if total < BAR_FROM:
            return
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # no thread of its own: a process with threads should not fork
        self._shown = tqdm(total=total, desc=self._label, unit="B", unit_scale=True, leave=False)

    def add(self, count: int) -> None:
        if self._shown is not None:  # past its end it would lose its shape
            self._shown.update(min(count, self._shown.total - self._shown.n))

    def close(self) -> None:
        if self._shown is not None:
            self._shown.close()


def terminal_width(stream: TextIO) -> int | None:
    """Columns to keep to; None where the text goes elsewhere than to a terminal."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def to_json(data: Mapping[str, object]) -> str:
    """JSON that every reader takes: no NaN, and text with lone surrogates escaped.

    What nobody reads by eye has one line per field: an indent takes Python's own encoder, ten times as slow.
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
    """Text from a file, fit for a terminal: control characters and lone surrogates are spelt out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def show_bytes(count: float) -> str:
    """A size for people, in units of 1000: `97.8 MB`."""
    if count < 1000:
        return f"{count:.0f} bytes"
    units = ["kB", "MB", "GB", "TB"]
    while (count := count / 1000) >= 999.5 and len(units) > 1:
        del units[0]
    return f"{count:.3g} {units[0]}"


def counted(count: int, one: str, more: str) -> str:
    """`1 value is`, `2 values are`."""
    return f"{count} {one if count == 1 else more}"


def show_names(names: Sequence[str], most: int = 4) -> str:
    """The first few names, and how many more."""
    shown = ", ".join(printable(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def fail(error: BaseException, *, as_json: bool, to_stderr: bool = False) -> int:
    """Says what went wrong and returns the exit code. Unknown faults are left to the caller.

    Args:
        as_json: one object on stdout, besides the line.
        to_stderr: the output file goes to stdout: the object goes where the result would, alone.
    """
    kind, message, hint, code = describe(error)
    if as_json:
        body: dict[str, object] = {"kind": kind, "message": message, "hint": hint}
        if isinstance(error, Mismatch):
            body |= mismatch_fields(error)
        with suppress(OSError):  # a full disk may be what went wrong
            click.echo(to_json({"error": body}), err=to_stderr)
        if to_stderr:
            return code
    with suppress(OSError):
        click.echo(f"{_coloured('error:', 'red')} {printable(message)}", err=True)
        if hint:
            click.echo(f"{_coloured('hint:', 'cyan')} {printable(hint)}", err=True)
    return code


def _coloured(word: str, colour: str) -> str:
    """For terminals (click strips it elsewhere), unless https://no-color.org asks for none."""
    return word if os.environ.get("NO_COLOR") else click.style(word, fg=colour, bold=True)


def mismatch_fields(error: Mismatch | Fit) -> dict[str, object]:
    return {
        "missing": error.missing,
        "unexpected": error.unexpected,
        "mismatched": [{"name": n, "file": theirs, "model": mine} for n, theirs, mine in error.mismatched],
    }


def describe(error: BaseException) -> tuple[str, str, str | None, int]:
    """(kind, message, hint, exit code) of everything that is expected to go wrong."""
    if isinstance(error, CkptToolError):
        return error.kind, error.message, error.hint, error.exit_code
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "ckpttool"
        return "usage", error.format_message(), f"{command} --help", error.exit_code
    if isinstance(error, click.ClickException):
        return "usage", error.format_message(), None, error.exit_code
    if isinstance(error, MemoryError):
        return "memory", "not enough memory", None, 3
    if isinstance(error, OSError):
        where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        return "system", where + (error.strerror or str(error)).lower(), None, 3
    if isinstance(error, ImportError) and not (error.name or "").startswith("ckpttool"):
        return "unsupported", f"a library can't be imported: {error}", "pip install torch torchvision", 3
    raise error
