"""A conversion as a plan that is divided into parts, in Python."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import CkptToolError, UsageFault

Result = dict[str, Any]  # what a command prints with --json


@dataclass(frozen=True)
class PlannedPart:
    """One part of a plan: small, and it pickles, so any pool of processes or machines can write it."""

    command: tuple[str, ...]
    part: str

    def write(self) -> Result:
        """Write this part in a process of its own; return what the command says with `--json`.

        Whoever writes the last part puts the output in place. Raises CkptToolError with the command's words.
        """
        return _result_of(_started([*self.command, "--part", self.part]))


@dataclass(frozen=True)
class DividedCommand:
    """A command of ckpttool that is carried out in parts, on one machine or many that share a folder."""

    command: tuple[str, ...]

    def parts(self, count: int) -> list[PlannedPart]:
        """Return `count` parts. Raises UsageFault for less than one."""
        if count < 1:
            raise UsageFault(f"{count} parts: at least one is needed")
        return [PlannedPart(self.command, f"{number}/{count}") for number in range(1, count + 1)]

    def finish(self, results: Iterable[Result] = ()) -> Result:
        """Return the result of the whole; put the output in place first, unless the last part did.

        Args:
            results: what the parts have returned.

        Raises:
            CkptToolError: a part is missing; the output can't be put in place.
        """
        whole = next((result for result in results if "part" not in result), None)
        return whole or _result_of(_started([*self.command, "--part", "finish"]))


def plan(command: str, *paths: str, **settings: Any) -> DividedCommand:
    """Return the plan of a command that writes one output, after a dry run of it in a process of its own.

    Args:
        command: its name, `strip-prefix`.
        paths: its inputs, and the output.
        settings: its flags: `dtype="bf16"` is `--dtype bf16`, `force=True` is `--force`; a list repeats one.

    Raises:
        CkptToolError: with the command's words, `kind` and `exit_code`: there is no such command or flag, an
            input is missing, the output exists, or it can't be written in parts. Later, in `part.write()` and
            `plan.finish()`, what only its values show.

    Example:
        >>> plan = ckpttool.plan("strip-prefix", "last.pt", "stripped.safetensors")
        >>> results = [part.write() for part in plan.parts(2)]
        >>> plan.finish(results)["output"]
        'stripped.safetensors'
    """
    words = [command, *map(str, paths)]
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        for each in value if isinstance(value, list | tuple) else [value]:
            words += [flag] if each is True else [] if each in (None, False) else [flag, str(each)]
    if said := settings.keys() & {"part", "jobs", "dry_run"}:
        raise UsageFault(f"plan(…, {min(said)}=…): the parts of a plan say that themselves")
    if "parts_in" not in settings:  # of a command that only reads all would be read
        _result_of(_started([*words, "--part", "1/1", "--dry-run"]))
    return DividedCommand(tuple(words))


@contextmanager
def all_but_first(words: Sequence[str], count: int) -> Iterator[Callable[[], list[Result]]]:
    """Write all parts of a command but the first, in processes that end with the block.

    Yields:
        What waits for them and returns what they say. It raises CkptToolError where one has failed.
    """
    running = [_started([*words, "--part", f"{number}/{count}"]) for number in range(2, count + 1)]
    try:
        yield lambda: [*map(_result_of, running)]
    finally:
        for each in running:
            each.terminate()
        for each in running:
            each.communicate()


def _started(words: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a command in a process of its own, as it stops at signals and counts its own requests."""
    command = [sys.executable, "-m", "ckpttool", *words, "--json"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)


def _result_of(process: subprocess.Popen[bytes]) -> Result:
    """Return what a command says at its end."""
    out, err = process.communicate()
    try:
        result: Result = json.loads(out or err)  # stdout may be the output itself
    except ValueError:
        lines = err.decode(errors="replace").strip().splitlines()
        raise CkptToolError(lines[-1] if lines else f"ended with exit code {process.returncode}") from None
    if fault := result.get("error"):
        error = CkptToolError(fault["message"], hint=fault.get("hint"))
        error.kind, error.exit_code = fault["kind"], process.returncode
        raise error
    return result
