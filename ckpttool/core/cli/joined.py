"""A command that only reads, carried out in parts: each reads its own, and the last one prints the result."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ... import __version__
from ...errors import CkptToolError, Unreadable, UsageFault
from .. import system
from ..words import first_few
from . import options
from .console import Console
from .options import rank_of_torchrun, recipe_of_parts, words_of_parts

if TYPE_CHECKING:
    from ..files.findings import Findings
    from ..files.parts import OutputPart, OutputParts

Run = Callable[..., int]


def _with_parts(function: options.F) -> options.F:
    """Run a command as one of several parts, where it is one."""

    @wraps(function)
    def command(console: Console, part: OutputPart | None, parts_in: str | None, **given: Any) -> Any:
        if part is None and parts_in is None:
            return function(console=console, **given)
        return in_parts(console, part, parts_in, function, given)

    return command  # type: ignore[return-value]


# The options of the commands that read every byte
reading_in_parts = options.all_of(
    options.option(
        "--part I/N",
        "Read part I of N; who finds all others done prints the result. Default under torchrun: its rank.",
        callback=options.this_part,
    ),
    options.option(
        "--parts-in FOLDER", "Where the parts meet: a folder that all of them see.", type=options.PATH
    ),
    options.reading,
    _with_parts,
)


def in_parts(
    console: Console, part: OutputPart | None, folder: str | None, run: Run, given: Mapping[str, Any]
) -> int:
    """Do a part of a command's reading, and print the result if it is the last; return the exit code.

    Raises UsageFault where parts can't meet, or are of another plan; PartMissing for `finish`; and what the
    command raises.
    """
    from ..files.findings import Findings, current, in_words
    from ..files.parts import RESULT, OutputParts
    from ..remote.places import shared_versions

    if part is None:
        raise click.UsageError("--parts-in says where parts meet: say with --part I/N which one this is")
    ctx = click.get_current_context()
    is_asked = ctx.get_parameter_source("part") is ParameterSource.COMMANDLINE
    if reason := _undivided(folder, given, is_asked=is_asked):
        if is_asked:
            raise UsageFault(reason[0], hint=reason[1])
        if rank_of_torchrun()[0]:
            return 0
        console.note(f"done by rank 0 alone: {reason[0]}")
        return run(console=console, **given)
    place = os.path.join(_meeting_place(folder), RESULT)

    def meet() -> OutputParts:
        opened = sorted(shared_versions().items())
        facts = {"version of ckpttool": __version__, "command": recipe_of_parts()}
        facts |= {f"input {path}": in_words(path, version) for path, version in opened}
        for left in (2, 1, 0):
            os.makedirs(os.path.dirname(place), exist_ok=True)
            try:
                return OutputParts(place, part, facts, {}, words_of_parts())
            except UsageFault as error:  # another process may have joined all, and taken the place away
                if not (left and isinstance(error.__cause__, FileNotFoundError)):
                    raise
        raise AssertionError("unreachable")

    findings = Findings(meet)
    token = current.set(findings)
    try:
        _read(findings, console, run, given)
        return _join(findings, console, run, given, os.path.dirname(place))
    finally:
        current.reset(token)
        if folder is None:
            with suppress(OSError):  # others have not read theirs
                os.rmdir(os.path.dirname(place))


def _undivided(folder: str | None, given: Mapping[str, Any], *, is_asked: bool) -> tuple[str, str] | None:
    """Return why a command can't be divided, and what to do about it; None where it can."""
    if any("-" in (value if isinstance(value, tuple) else (value,)) for value in given.values()):
        return "only one process can read stdin", "leave out --part, or name a file"
    if folder is not None and "://" in folder:
        return f"{folder}: parts of a reading meet in no URL", "name a folder that all of them see"
    if folder is not None:
        return None
    if is_asked:
        return "--part: no output says where the parts of a reading meet", "name a folder: --parts-in FOLDER"
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return "ranks of several machines meet where --parts-in says", ""
    return None


def _meeting_place(folder: str | None) -> str:
    """Return the folder where parts meet; of ranks on one machine one of torchrun's own."""
    import tempfile

    if folder is not None:
        return folder
    run = os.environ["TORCHELASTIC_RUN_ID"].replace("/", "-")[:40]
    own = os.path.join(tempfile.gettempdir(), f"ckpttool-{run}-{os.getppid()}")
    os.makedirs(own, 0o700, exist_ok=True)
    if os.path.islink(own) or not system.is_mine(os.stat(own)):
        raise Unreadable(own, "is not ours", hint="name another folder: --parts-in FOLDER")
    return own


def _read(findings: Findings, console: Console, run: Run, given: Mapping[str, Any]) -> None:
    """Do what falls to this part. What it would print is of no use: it lacks what the others find."""
    more = {"html": None} if "html" in given else {}
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            run(console=replace(console, quiet=True), **{**given, **more})
    except CkptToolError as error:
        # What is wrong with the input, whoever joins says, in the order of the whole.
        if not findings.has_begun or isinstance(error, Unreadable | UsageFault):
            raise
    parts = findings.parts
    if parts.part.number and not parts.is_written:
        try:
            findings.note(done=True)
        except OSError:
            if not parts.is_finished:
                raise


def _join(findings: Findings, console: Console, run: Run, given: Mapping[str, Any], folder: str) -> int:
    """Print the result, if all parts are done; else which are not."""
    parts = findings.parts
    waiting = [] if parts.is_finished else parts.waiting()
    if waiting and not parts.part.number:
        raise parts.lacking(folder, waiting)
    if not (waiting or parts.is_finished):
        with parts.finishing() as is_mine:
            if is_mine:
                findings.join()
                with _forgotten(parts):
                    return run(console=console, **given)
    if console.json:
        console.result("", {"part": str(parts.part), "waiting": [each.number for each in waiting]})
    if findings.whole and console.verbose:
        console.note(f"{findings.whole} of its tensors and records are computed, and not divided")
    those = f"part{'s' * (len(waiting) > 1)} {first_few(waiting)}"
    rest = f"still to come: {those}; the last one prints the result"
    console.note(f"did part {parts.part}; {rest if waiting else 'another process prints the result'}")
    return 0


@contextmanager
def _forgotten(parts: OutputParts) -> Iterator[None]:
    """Remove the place of the parts once the result, or what is wrong with the input, is printed."""
    try:
        yield
    except CkptToolError as error:
        if not isinstance(error, Unreadable):
            parts.forget()
        raise
    parts.forget()
