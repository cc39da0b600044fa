"""The command `ckpttool digest`."""

from __future__ import annotations

from typing import Any

import click

from .. import options
from ..console import printable
from ..reading import Answer, answer_each, note_state, open_file


@click.command("digest")
@options.files_argument
@options.state_option
@options.no_verify_option
@options.reading
def command(files: tuple[str, ...], state: str | None, no_verify: bool, **given: Any) -> int:
    """Print one SHA-256 for the names, types, shapes and values of the model in each FILE.

    It is the same in every format; docs/digest.md defines it. With -q only the digest is printed.

    \b
    Example:
      ckpttool digest model.safetensors
    """
    from ...analysis.checks import digest

    console = options.console(given)

    def answer(file: str) -> Answer:
        with open_file(console, file) as checkpoint:
            found = checkpoint.state(state)
            note_state(console, checkpoint, state)
            with console.progress(checkpoint.nbytes, "hashing") as progress:
                value = digest(checkpoint, state=state, verify=not no_verify, progress=progress)
        data = {"digest": value, "state": found.where, "keys": len(found.tensors), "path": file}
        return Answer(f"{value}  {printable(file)}", data, in_quiet=value)

    return answer_each(files, console, answer)
