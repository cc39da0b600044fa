"""Lines to paste: commands quoted for a shell, and the Python that loads a state."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.state import State
from ...formats.saving.destination import format_of_name
from ...inert_pickle.known_names import MAX_INTEGER, TAKEN
from ...inert_pickle.values import Global, walk
from ...tensors.ref import Storage, TensorRef


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


PICKLED = ("torch-zip", "torch-legacy", "torch-tar")  # the formats that torch.load reads
NEW_PROTOCOL = 4  # from it on, Python's pickler uses opcodes that `weights_only` lacks


def refused_by_torch(checkpoint: Checkpoint, *, rewritten: bool = False) -> tuple[str, ...]:
    """Return what `torch.load(weights_only=True)`, torch's default, refuses a `.pt` file for."""
    names = dict.fromkeys(_refused(checkpoint.tree, checkpoint.protocol))
    if checkpoint.protocol >= NEW_PROTOCOL and not rewritten:
        names[f"pickle protocol {checkpoint.protocol}"] = None
    return tuple(names)


def _refused(tree: object, protocol: int) -> Iterator[str]:
    for value in walk(tree):
        if isinstance(value, Global) and value not in TAKEN:
            yield str(value)
        elif isinstance(value, frozenset):
            yield "frozenset"
        elif isinstance(value, bytes | bytearray) and protocol > 2:
            yield f"{type(value).__name__} of pickle protocol {protocol}"
        elif isinstance(value, int) and value.bit_length() >= MAX_INTEGER:
            yield "an integer of more than 255 bytes"


def python_line(checkpoint: Checkpoint, state: State, file: str, *, rewritten: bool) -> str:
    """Return the line that loads a state strictly into `model`, whatever program runs it."""
    form = format_of_name(file) if rewritten else checkpoint.format
    if form == "safetensors" and not checkpoint.full:
        return f"safetensors.torch.load_model(model, {file!r})"
    is_torch = form in PICKLED and state.module is None
    if is_torch and not refused_by_torch(checkpoint, rewritten=rewritten):
        device = ", map_location='cpu'" if _is_elsewhere(checkpoint.tree) else ""
        keys = "".join(f"[{key!r}]" for key in state.path)
        return f"model.load_state_dict(torch.load({file!r}{device}){keys})"
    where = f", state={state.where!r}" if state.path else ""
    return f"ckpttool.reload({file!r}, model{where})"


def _is_elsewhere(tree: object) -> bool:
    """Return whether a storage is tagged with another device than the CPU, which may be missing."""
    storages = (value.storage if isinstance(value, TensorRef) else value for value in walk(tree))
    return any(isinstance(each, Storage) and each.location != "cpu" for each in storages)
