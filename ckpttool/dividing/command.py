"""The command `ckpttool finish`."""

from __future__ import annotations

import os

import click

from ..core.cli import options
from ..core.cli.console import Console
from ..core.cli.rewriting import rewritten
from ..core.cli.schemas import Fields


def _printed() -> list[Fields]:
    """Return what the command of the parts prints."""
    from ..core.cli.program import SECTIONS

    known = [each for commands in SECTIONS.values() for each in commands]
    readers = [each for each in known if "parts_in" in [param.name for param in each.params]]
    several: Fields = {"files": ([dict[str, object]], "of each file what the command prints of it")}
    return [rewritten(), several, *(fields for each in readers for fields in each.printed())]


@options.command("Convert", "Put the parts of an output in place", _printed)
@click.argument("out", metavar="OUT", type=options.PATH)
@options.reading
def finish(console: Console, out: str) -> int:
    """Put an output in place whose parts are all written, where the last part could not.

    The command of the parts is run again, but writes none of them: it compares the checksums of the inputs
    with what all parts have read, writes the headers, and reads them back. A part that is missing is named,
    with exit code 1. A command with --model, which runs code, has to be given again, with --part finish.
    Of a command that only reads, OUT is the folder of --parts-in, and the result is printed.

    \b
    Examples:
      ckpttool finish model.safetensors
    """
    from ..core.cli.program import run
    from ..core.files import meeting, parts
    from ..core.remote.uploaded_parts import meeting_at
    from ..errors import UsageFault

    result = os.path.join(out, parts.RESULT)  # of parts that only read
    is_reading = os.path.isdir(meeting.folder_of(result)) or (os.path.isdir(out) and not os.listdir(out))
    place = result if is_reading else out
    words = meeting.plan_of(place, meeting_at(place)).get(parts.WORDS)
    if not words or any(str(word).startswith("--model") for word in words):  # code that only the user names
        what = f"{out}: its plan does not say the command, as of one with a secret or with --model"
        raise UsageFault(what, hint=f"run the command of the parts again with --part {parts.FINISH}")
    shown = [flag for flag, is_on in (("--json", console.json), ("-q", console.quiet)) if is_on]
    return run([*map(str, words), "--part", parts.FINISH, *shown])
