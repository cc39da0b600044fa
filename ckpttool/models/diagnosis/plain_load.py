"""Write the line of Python with which any program loads a state, by torch or safetensors where they can."""

from __future__ import annotations

from collections.abc import Iterator

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.state import State
from ...formats.saving.destination import format_of_name
from ...inert_pickle.values import Global, walk
from ...inert_pickle.weights_only import MAX_INTEGER, TAKEN
from ...tensors.ref import Storage, TensorRef

PICKLED = ("torch-zip", "torch-legacy", "torch-tar")
"""The formats that `torch.load` reads."""

NEW_PROTOCOL = 4
"""The pickle protocol from which Python's pickler uses opcodes that `weights_only` lacks."""


def refused_by_torch(checkpoint: Checkpoint, *, rewritten: bool = False) -> tuple[str, ...]:
    """Return what `torch.load(weights_only=True)`, torch's default, refuses a `.pt` file for.

    Args:
        checkpoint: its tree is, or will be, in the file.
        rewritten: this package writes the file; it uses no opcodes of a newer protocol.

    Returns:
        Names of types and functions, and other words, each once; empty if torch takes the file.
    """
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
    """Return the line that loads a state strictly into `model`, whatever program runs it.

    Args:
        checkpoint: its tree is, or will be, in the file.
        state: the state in it.
        file: the file's name.
        rewritten: this package writes the file, as `.safetensors` or `.pt` by its name.

    Returns:
        A call of torch or safetensors, or of `ckpttool.reload` where torch refuses the file.
    """
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
