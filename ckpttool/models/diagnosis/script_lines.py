"""Commands as lines of a shell script, whatever the names of files and keys are."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable


def command_line(words: Iterable[str]) -> str:
    """Join words into a line that a shell splits into the same words, as `shlex.join` does."""
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    # bash, zsh and POSIX.1-2024 know $'…'. It contains no quote, so that a shell that does not know it reads
    # another word, never a command.
    return "$'" + "".join(map(_escaped, word)) + "'"


def _escaped(character: str) -> str:
    if character.isprintable() and character not in "'\\":
        return character
    try:
        raw = os.fsencode(character)  # keeps bytes of a file's name that are not text
    except UnicodeEncodeError:
        raw = character.encode("utf-8", "surrogatepass")
    return "".join(f"\\{byte:03o}" for byte in raw)
