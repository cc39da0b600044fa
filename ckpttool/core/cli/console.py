"""The console: text in the columns of a terminal, and how a command prints results, notes and progress."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TextIO

import click

from ...errors import masked
from ..words import counted as counted
from ..words import finite, versioned
from ..words import printable as printable
from ..words import show_bytes as show_bytes
from ..words import show_names as show_names

if TYPE_CHECKING:
    from ..files.threads import Progress
    from ..remote.store import Traffic


def terminal_width(stream: TextIO) -> int | None:
    """Return the columns of the terminal that `stream` is; None if it is none."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def columns(text: str) -> int:
    """Return the number of columns that a line of printable text takes."""
    if _is_narrow(text):
        return len(text)
    from wcwidth import width

    return width(text)


def _is_narrow(text: str) -> bool:
    """Whether each character takes one column: then wcwidth, whose import takes 40 ms, is not needed."""
    return text.isascii() or max(text.replace("…", ""), default="") < "\u0300"


def _clip(text: str, start: int, end: int) -> str:
    """Return the characters that lie whole between two columns."""
    if _is_narrow(text):
        return text[start:end]
    from wcwidth import clip

    return clip(text, start, end, fillchar="")


def cut(text: str, width: int | None) -> str:
    """Cut the end of `text` to `width` columns, with "…" in its place; None cuts nothing."""
    return text if width is None else _cut(text, width, max(width - 1, 1), 0)


def cut_front(text: str, width: int) -> str:
    """Cut the start of `text` to `width` columns: names that share their start differ at their end."""
    return _cut(text, width, 0, max(width - 1, 1))


def cut_middle(text: str, width: int) -> str:
    """Cut the middle of `text` to `width` columns: both ends of a path tell where something is."""
    return _cut(text, width, width // 2, max(width - 1, 0) // 2)


def _cut(text: str, width: int, start: int, end: int) -> str:
    wide = columns(text)
    return text if wide <= width else f"{_clip(text, 0, start)}…{_clip(text, wide - end, wide)}"


def left(text: str, width: int) -> str:
    """Pad `text` with spaces on its right to `width` columns."""
    return text + " " * (width - columns(text))


def right(text: str, width: int) -> str:
    """Pad `text` with spaces on its left to `width` columns."""
    return " " * (width - columns(text)) + text


def wrapped(text: str, width: int, *, whole_words: bool = False) -> list[str]:
    """Break `text` between words into lines of at most `width` columns.

    A longer word is broken behind a dot or slash, else an underscore, else where a line ends. With
    `whole_words` it stays whole, as a path to be copied.
    """
    lines: list[str] = []
    line = ""
    for gap, word in re.findall(r"(\s*)(\S+)", text):
        gap = " " * len(gap)
        for part in [word] if whole_words else _parts(word, width):
            if columns(line + gap + part) <= width:
                line += gap + part
            else:
                lines, line = lines + [line] * bool(line), part
            gap = ""
    return [*lines, line] if line else lines


def _parts(word: str, width: int) -> Iterator[str]:
    """Yield a word in parts of at most `width` columns."""
    while columns(word) > width:
        head = _clip(word, 0, max(width, 2))
        end = max(head.rfind("."), head.rfind("/")) + 1 or head.rfind("_") + 1 or max(len(head), 1)
        yield word[:end]
        word = word[end:]
    yield word


def without(heads: Sequence[str], width: int) -> list[str]:
    """Return lines that name what a table leaves out in a narrow terminal; none if that is nothing."""
    said = f"without {', '.join(heads)}, for which the terminal is too narrow; | cat has them"
    return wrapped(said, width) if heads else []


def fitting(widths: Sequence[int], width: int) -> int:
    """Return how many columns of these widths, the first ones, fit with two spaces before each."""
    return sum(total <= width for total in accumulate(wide + 2 for wide in widths))


def table(
    rows: Sequence[Sequence[str]], to_the_left: Collection[int], width: int | None = None
) -> Iterator[str]:
    """Yield one line per row, each column as wide as its widest cell. Where that is wider than `width`, the
    first column gives way, and what words in the last one leave of the line is cut."""
    widths = [max(map(columns, column)) for column in zip(*rows, strict=True)]
    if width is not None and rows:
        least = min(widths[0], 16)
        last = min(widths[-1], 16) if len(widths) - 1 in to_the_left else widths[-1]
        rest = sum(widths[1:-1]) + last + 2 * (len(widths) - 1)
        widths[:1] = [min(widths[0], max(width - rest, least))]
    pads = [left if i in to_the_left else right for i in range(len(widths))]
    for first, *others in rows:
        cells = [cut_front(first, widths[0]), *others]
        line = "  ".join(pad(cell, wide) for pad, cell, wide in zip(pads, cells, widths, strict=True))
        yield cut(line.rstrip(), width)


# ---- Results, notes and progress bars.
#
# Data goes to stdout; progress, notes, hints and errors go to stderr.


BAR_FROM = 64 << 20  # bytes of work from which a progress bar is drawn
NARROW_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {remaining}"
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
        if requests and (traffic := _traffic()):
            data = {**data, "requests": requests, "bytes_read": nbytes}
            for remark in traffic.taken():
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
            text, width = masked(text), None if pasted else terminal_width(sys.stderr)
            with suppress(OSError):  # a note that can't be printed does not fail the command
                lines = [text] if width is None else wrapped(text, width, whole_words=True)
                click.echo("\n".join(lines), err=True)

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
        if (width := terminal_width(sys.stderr) or 80) < 80:  # speed and seconds would leave it one character
            units |= {"ncols": width - 1, "bar_format": NARROW_BAR}
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
