"""What commands share: the file and state they read, an answer for each file, results as JSON and notes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import click

from ..contract import versioned
from .console import Console, coloured, printable
from .failure import Call, describe, error_fields, fail

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint
    from ..formats.one_of_several import ModelFile

# What a note says before the names in a field of a result, by the result's class
SAID = {
    "Outcome": {"kept": "kept as they were", "left_out": "left out"},
    "Saved": {
        "tied": "written once, with the tie in the metadata",
        "copied": "written once per name, though they share memory",
        "given_back": "put into the folder by another process meanwhile, and kept",
        "not_removed": "could not be removed",
    },
    "Split": {
        "whole": "whole on every rank, as buffers are (--whole adds others)",
        "perhaps_buffers": "cut, though no parameter of the optimizer (--whole NAME, if it is a buffer)",
        "repeated": "the same in extra_state of every rank",
        "removed": "removed, as files of an earlier split",
        "copied": "cut apart from tensors that they share memory with",
        "left_out": "left out",
    },
    "Merged": {
        "replaced": "replaced by the adapter's",
        "cast": "of other types in the adapter, and cast to the model's",
        "added": "added",
        "followed": "tied to an updated weight, and changed with it as in PEFT's merge",
        "untied": 'no longer tied: set "tie_word_embeddings": false in config.json',
    },
    "PoolReport": {"not_finite": "NaN or infinite values"},
    "Mapped": {"tied": "other names of one tensor, added or taken away", "also": "changed too"},
    "Quantized": {"left_plain": "not quantised"},
    "Averaged": {"parallel": "too nearly parallel for slerp, so merged linearly"},
    "Extracted": {
        "lowered": "of the rank of their smaller side, which is less",
        "saved": "whole in the adapter",
        "dropped": "left out, though they differ",
        "cast": "of other types in the two models: a merge has BASE's",
    },
    "Reloaded": {
        "kept": "kept as they are in the model",
        "ignored": "ignored, as the model does not have them",
        "added": "missing in the file, kept as they are in the model",
    },
}

# Names in JSON of fields that are called otherwise in the library
RENAMED = {"path": "output", "nbytes": "bytes", "taken": "taken_from_last"}

COUNTED = {"averaged", "sharded"}  # fields of names, of which JSON has the number

# Fields that JSON has only if there is something to say
IF_ANY = {"shards", "text_keys", "keyed_by_text", "not_copied", "given_back", "not_removed"}


def open_file(console: Console, path: str) -> Checkpoint:
    """Open a file, and warn if it is one of several that hold a model together."""
    from .. import formats

    checkpoint = formats.open(path)
    note_piece(console, path)
    return checkpoint


def note_piece(console: Console, path: str) -> ModelFile | None:
    """Warn if a file is one of several that hold a model together, and return what is known of them."""
    from ..formats.one_of_several import piece_of

    if (piece := piece_of(path)) is not None:
        console.note(f"{coloured('warning:', 'yellow')} {piece.warning(console.names)}", pasted=True)
    return piece


def note_state(console: Console, checkpoint: Checkpoint, asked: str | None, *, named: bool = False) -> None:
    """Note which state was chosen, if --state did not name it and there are others."""
    taken = checkpoint.found_state() if asked is None else None
    if taken is not None and (others := checkpoint.other_states(taken.path)):
        file = f"{checkpoint.path}: " if named else ""
        where = f"'{taken.where}'" if taken.where else "the file itself"
        flags = [f"--state {shlex.quote(other)}" for other in others]
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
    from ..formats.dcp.reading import NAME  # a format that holds no numbers as keys

    for this, other, names in zip(files, reversed(files), text_keys, strict=True):
        if names:
            where = f"keyed by text in {printable(this.path)} and by numbers in {printable(other.path)}"
            lost = "" if this.format == NAME else " (an optimizer's load_state_dict finds nothing there)"
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
    """Note the names in a result's fields that SAID has words for."""
    for name, said in SAID.get(type(result).__name__, {}).items():
        console.note_names(said, getattr(result, name))


def fields_of(
    result: object, renamed: Mapping[str, str] = RENAMED, *, without: Collection[str] = ()
) -> dict[str, object]:
    """Return the fields of a result for JSON; of no result, none."""
    if not is_dataclass(result):
        return {}
    shown = (each.name for each in fields(result) if each.metadata.get("json", True))
    data = {name: getattr(result, name) for name in shown if name not in without}
    return {
        renamed.get(name, name): len(value) if name in COUNTED else _plain(value)
        for name, value in data.items()
        if value or name not in IF_ANY
    }


def _plain(value: Any) -> object:
    """Return dataclasses and named tuples, also in a tuple, as dicts."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, tuple) and value and not isinstance(value[0], str):
        return [_plain(item) for item in value]
    return value
