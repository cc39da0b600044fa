"""The folders of the repository, and the result of one run of the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"


@dataclass(frozen=True)
class Ran:
    """One run of the command line: its exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Stdout parsed as JSON."""
        return json.loads(self.out)


Cli = Callable[..., Ran]
"""The fixture `cli`, which runs a command in this process."""


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    """Return the class and the message of the error that a call ends in; two times "" if it ends well."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, getattr(error, "message", str(error))
    return "", ""


def assert_says(ran: Ran, code: int, *words: str) -> None:
    """Raise AssertionError unless a command ended with a code, and said all these words on stderr."""
    missing = [each for each in words if each not in ran.err]
    assert (ran.code, missing) == (code, []), f"exit {ran.code}: {ran.out}{ran.err}"
