"""Commands as one line of a shell, whatever is in the names of files and keys."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable


def command_line(words: Iterable[str]) -> str:
    """Words as a shell reads them back: like `shlex.join`, but without a control character or a line break.

    A word with one is written as `$'…'`, which bash, zsh and POSIX of 2024 know. It holds no quote of its
    own, so that a shell that does not know the form takes it for another word and never for a command.
    """
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(map(_escaped, word)) + "'"


def _escaped(character: str) -> str:
    if character.isprintable() and character not in "'\\":
        return character
    try:
        raw = os.fsencode(character)  # the bytes of a file's name that are not text are kept as they are
    except UnicodeEncodeError:
        raw = character.encode("utf-8", "surrogatepass")
    return "".join(f"\\{byte:03o}" for byte in raw)
