"""The command `ckpttool explain`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import click

from ..core.cli import options
from ..core.cli.console import Console, counted, printable
from ..core.cli.reading import fields_of
from ..core.cli.schemas import Fields, fields_like
from ..core.words import in_short
from ..errors import UsageFault

if TYPE_CHECKING:
    from .messages import Explanation

BLOCK = 1 << 20  # bytes of a text that are read at a time
UNKNOWN = "not known: none of the errors in docs/errors.md is in this text"
HINT = "why a checkpoint does not load into a model: ckpttool doctor FILE --model SPEC"


def _printed() -> Fields:
    from .stalls import Stall

    one = fields_like(Stall, maybe=("ranks", "waiting", "is_root"))
    return {**one, "also": ([one], "the others that were found, causes first")}


@options.command("Load", "What an error message means, or which rank hangs", _printed)
@options.argument("files", "[FILE]…", nargs=-1)
@options.reading
def explain(console: Console, files: tuple[str, ...]) -> int:
    """Say what an error means, which commands show or mend the cause, and which page has more.

    The error is read from FILE or stdin: a message, a traceback or a whole log, as it was pasted. Where it
    names one checkpoint, so do the commands. Of several errors the cause comes first. Only the rules behind
    docs/errors.md answer, without a network: a text that they don't know is exit 1.

    FILEs can also be the dumps of torch's flight recorder, one a rank, or their folder. Then it says which
    rank did not come to which collective, with shapes and stacks. The dumps are pickles; nothing that they
    name is run. Exit 1 if no rank waits for another.

    \b
    Examples:
      ckpttool explain error.log
      ckpttool explain fr_trace_rank*
    """
    from . import flight_recorder, messages, stalls

    found: Sequence[Explanation]
    _require_files(files)
    if any(flight_recorder.is_dump(path) for path in files if path != "-"):
        dumps, missing = flight_recorder.read_dumps(flight_recorder.paths_of(files))
        found = stalls.stalls(dumps, missing)
        unknown = f"no rank waits for another, by the dumps of {counted(len(dumps), 'rank')}"
    else:
        found = messages.explain(*map(_blocks, files or ("-",)))
        unknown = f"{UNKNOWN}\n{HINT}"
    first = found[0] if found else messages.Explanation("unknown", unknown.partition("\n")[0])
    shown = found if console.verbose else found[:1]
    lines = [line for each in shown for line in _lines(console, each)] or [unknown]
    if also := [each.kind for each in found[len(shown) :]]:
        lines.append(f"also: {', '.join(also)} (-v says what they mean)")
    console.result("\n".join(lines), {**fields_of(first), "also": [fields_of(each) for each in found[1:]]})
    return 0 if found else 1


def _require_files(paths: Sequence[str]) -> None:
    """Refuse a message in the place of a file."""
    from ..core.remote.urls import is_url

    for path in paths:
        if re.search(r"\s", path) and not is_url(path) and not os.path.lexists(path):
            hint = "an error itself is read from stdin: echo 'TEXT' | ckpttool explain"
            raise UsageFault(f"{in_short(path)}: no such file", hint=hint)


def _lines(console: Console, each: Explanation) -> Iterator[str]:
    yield from map(console.sentence, map(printable, f"{each.kind}: {each.message}".split("\n")))
    yield from (f"  {printable(command)}" for command in each.commands)
    yield f"more: {each.page}"


def _blocks(path: str) -> Iterable[bytes]:
    """Return the text of a file or of stdin in blocks."""
    from ..core.remote.places import open_source_at

    if path == "-":
        if sys.stdin.isatty():
            click.echo("paste the error, then press Ctrl-D", err=True)
        return iter(lambda: sys.stdin.buffer.read(BLOCK), b"")
    source = open_source_at(path)
    if source.read(0, min(source.size, 4)) == b"PK\3\4":
        hint = f"to see why it does not load: ckpttool doctor {path} --model SPEC"
        raise UsageFault(f"{path}: is a checkpoint, and not the text of an error", hint=hint)
    return (source.read(at, min(BLOCK, source.size - at)) for at in range(0, source.size, BLOCK))
