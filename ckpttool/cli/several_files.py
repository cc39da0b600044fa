"""One answer for each of several FILEs, with one exit code for all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import click

from .console import Console
from .failure import Call, describe, error_fields, fail


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command says of one file.

    Attributes:
        text: for people.
        data: the fields of the JSON object.
        code: exit code, 0 or 1.
        in_quiet: what -q leaves of `text`.
    """

    text: str
    data: Mapping[str, object]
    code: int = 0
    in_quiet: str | None = None


def answer_each(
    files: tuple[str, ...], console: Console, answer: Callable[[str], Answer], *, between: str = ""
) -> int:
    """Print the answer for each file, and return the highest exit code.

    One file is answered alone: its JSON is one object, and an error is raised. Of several, the JSON is
    `{"files": [one object for each]}`, and the error of a file is printed in its place.

    Args:
        files: the paths, one or more.
        console: where to print.
        answer: returns the answer for one path.
        between: text that parts the answers for people.
    """
    if len(files) == 1:
        found = answer(files[0])
        console.result(found.text, found.data, in_quiet=found.in_quiet)
        return found.code
    call = Call(click.get_current_context().command_path)
    highest, objects = 0, []
    for number, path in enumerate(files):
        call.paths = (path,)
        try:
            found = answer(path)
        except Exception as error:
            if os.environ.get("CKPTTOOL_DEBUG") == "1":
                raise
            highest = max(highest, describe(error, call)[-1])
            if console.json:
                objects.append({"path": path, **error_fields(error, call)})
            else:
                fail(error, as_json=False, call=call)
            continue
        highest = max(highest, found.code)
        objects.append({"path": path, **found.data})
        if not console.json:
            console.result(between * bool(number) + found.text, {}, in_quiet=found.in_quiet)
    if console.json:
        console.result("", {"files": objects})
    return highest
