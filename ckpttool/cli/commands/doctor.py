"""The command `ckpttool doctor`."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from .. import options
from ..console import printable, stdout_kept_for_results
from ..failure import mismatch_fields
from ..reading import fields_of, open_file

if TYPE_CHECKING:
    from ...models.diagnosis import Diagnosis, Problem


WIDTH = 110  # Columns of a comment, if the terminal has no fewer


@click.command("doctor")
@options.file_argument
@options.model_option
@options.state_option
@options.reading
def command(file: str, model: str, state: str | None, **given: Any) -> None:
    """Say why FILE does not load into a model, and which commands fix it.

    The output is a script: the commands are ready to paste, or to pipe into sh, and what follows # is for
    reading. Each command was tried, in memory, on the names and shapes of FILE; the last one loads the result
    strictly. Exit 0 if torch's load_state_dict takes FILE as it is, 1 if it does not. A wrapper's prefix is
    a problem for torch alone: reload strips it by itself, and a remark says so.

    \b
    Example:
      ckpttool doctor last.pt --model torchvision:resnet18
    """
    from ...models.doctor import doctor
    from ...models.skeleton import skeleton

    console = options.console(given)
    with open_file(console, file) as checkpoint, stdout_kept_for_results():
        diagnosis = doctor(checkpoint, skeleton(model), state=state, spec=model)
    console.result("\n".join(_script(diagnosis, model)), _fields(diagnosis))
    if any(not problem.is_remark for problem in diagnosis.problems):
        raise click.exceptions.Exit(1)


def _fields(diagnosis: Diagnosis) -> dict[str, object]:
    problems = [_problem(problem) for problem in diagnosis.problems]
    return {
        **fields_of(diagnosis, {}, without=("fit",)),
        "problems": problems,
        **mismatch_fields(diagnosis.fit),
    }


def _problem(problem: Problem) -> dict[str, object]:
    fields: dict[str, object] = {
        "kind": problem.kind,
        "message": problem.message,
        "remark": problem.is_remark,
    }
    return fields | ({"command": problem.command} if problem.command else {})


def _script(diagnosis: Diagnosis, spec: str) -> Iterator[str]:
    """Yield the lines of a shell script: commands, and everything else as comments."""
    verb = "loads" if diagnosis.loads else "does not load"
    why = f": {diagnosis.fit}" if diagnosis.fit.distance else ""
    yield from _comment(f"{diagnosis.path} {verb} into {spec}{why}")
    wrong = [problem for problem in diagnosis.problems if not problem.is_remark]
    for problem in wrong:
        yield from _comment(f"{problem.kind}: {problem.message}")
        if problem.command and problem.command != diagnosis.then:
            yield problem.command
    if diagnosis.then is None:
        yield "# no command can fix that"
    elif wrong:
        yield diagnosis.then
    if diagnosis.python:
        yield f"# {'or in Python' if wrong else 'in Python'}: {printable(diagnosis.python)}"
    for problem in diagnosis.problems:
        if problem.is_remark:
            yield from _comment(f"{problem.kind}: {problem.message}")
            if problem.command:
                yield f"#   {problem.command}"


def _comment(text: str) -> list[str]:
    """Return text as comment lines, no wider than the terminal."""
    width = min(shutil.get_terminal_size().columns, WIDTH) if sys.stdout.isatty() else WIDTH
    return textwrap.wrap(
        printable(text), width, initial_indent="# ", subsequent_indent="#   ", break_long_words=False
    )
