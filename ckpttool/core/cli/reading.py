"""What commands share: the file and state they read, an answer for each file, results as JSON and notes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any

import click

from ..words import tellings, versioned
from .console import Console, coloured, printable
from .failure import Call, describe, error_fields, fail

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint
    from ..formats.shards import ModelFile


def open_file(console: Console, path: str) -> Checkpoint:
    """Open a file, and warn if it is one of several that hold a model together."""
    from .. import formats

    checkpoint = formats.open(path)
    note_piece(console, path)
    return checkpoint


def note_piece(console: Console, path: str) -> ModelFile | None:
    """Warn if a file is one of several that hold a model together, and return what is known of them."""
    from ..formats.shards import piece_of

    if (piece := piece_of(path)) is not None:
        console.note(f"{coloured('warning:', 'yellow')} {piece.warning(console.names)}", pasted=True)
    return piece


def note_state(console: Console, checkpoint: Checkpoint, asked: str | None, *, named: bool = False) -> None:
    """Note which state was chosen, if --state did not name it and there are others."""
    from ..checkpoint.state import SCORED, scored_average

    taken = checkpoint.found_state() if asked is None else None
    if taken is not None and (others := checkpoint.other_states(taken.path)):
        file = f"{checkpoint.path}: " if named else ""
        where = f"'{taken.where}'" if taken.where else "the file itself"
        marks = {scored_average(checkpoint.tree): f" ({SCORED})"}
        flags = [f"--state {shlex.quote(other)}{marks.get(other, '')}" for other in others]
        console.note(f"{printable(file)}state: {printable(where)}; also available: {console.names(flags)}")


def note_unread(console: Console, *checkpoints: Checkpoint) -> None:
    """Note what a comparison of checkpoints can't see, such as values that differ between ranks."""
    from ..checkpoint.state import parts_beside

    for checkpoint in checkpoints:
        parts = parts_beside(checkpoint.tree)
        beside = [f"its tensors, in {printable(parts['folder'])} beside it"] if parts else []
        console.note_names(f"not compared, of {printable(checkpoint.path)}", [*checkpoint.unread, *beside])


def note_keys(console: Console, files: Sequence[Checkpoint], text_keys: Sequence[Sequence[str]]) -> None:
    """Note which dicts of two files are keyed by text in the one and by numbers in the other."""
    for this, other, names in zip(files, reversed(files), text_keys, strict=True):
        if names:
            where = f"keyed by text in {printable(this.path)} and by numbers in {printable(other.path)}"
            lost = "" if this.format == "dcp" else " (an optimizer's load_state_dict finds nothing there)"
            console.note_names(where + lost, names)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command says of one file."""

    text: str  # for people
    data: Mapping[str, object]  # the fields of the JSON object
    code: int = 0  # exit code, 0 or 1
    in_quiet: str | None = None  # what -q leaves of `text`


def answer_each(
    files: tuple[str, ...], console: Console, answer: Callable[[str], Answer], *, between: str = ""
) -> int:
    """Print the answer for each file, and return the highest exit code."""
    if len(files) == 1:  # its JSON is one object, and an error is raised
        reply = answer(files[0])
        console.result(reply.text, reply.data, in_quiet=reply.in_quiet)
        return reply.code
    call = Call(click.get_current_context().command_path)
    highest, objects = 0, []
    for number, path in enumerate(files):
        call.paths = (path,)
        try:
            reply = answer(path)
        except Exception as error:
            if os.environ.get("CKPTTOOL_DEBUG") == "1":
                raise
            reply = Answer("", error_fields(error, call), describe(error, call)[-1])
            if not console.json:
                fail(error, as_json=False, call=call)
        else:
            if not console.json:
                console.result(between * bool(number) + reply.text, {}, in_quiet=reply.in_quiet)
        highest = max(highest, reply.code)
        objects.append(versioned({"path": path, **reply.data}))  # each as if it were alone
    if console.json:
        console.result("", {"files": objects})
    return highest


def note_fields(console: Console, result: object) -> None:
    """Note the names in those fields of a result that have words for a note."""
    for each in tellings(type(result)):
        if each.note:
            console.note_names(each.note, getattr(result, each.name))


def fields_of(result: object) -> dict[str, object]:
    """Return the fields of a result for JSON; of no result, none."""
    data: dict[str, object] = {}
    for each in tellings(type(result)):
        value = getattr(result, each.name)
        if each.json is not None and (value or not each.if_any):
            data[each.json] = len(value) if each.counted else _plain(value)
    return data


def _plain(value: Any) -> object:
    """Return dataclasses and named tuples, also in a tuple, as dicts."""
    if is_dataclass(value):
        return fields_of(value)
    if hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, tuple) and value and not isinstance(value[0], str):
        return [_plain(item) for item in value]
    return value
