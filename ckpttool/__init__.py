"""ckpttool: a workbench for PyTorch checkpoints.

    import ckpttool

    with ckpttool.open("last.pt") as checkpoint:        # no torch, nothing executed, nothing loaded
        state = checkpoint.state()                      # names, dtypes, shapes
        print(state.where, len(state.tensors))
        tensors = state.load()                          # torch tensors, mapped from the file
    ckpttool.reload("last.pt", model)                   # strictly, into a plain torch module

A change makes a new checkpoint, whose tensors still lie in the old file until it is saved:

    with ckpttool.open("last.pt") as checkpoint:
        plain, renaming = ckpttool.strip_prefix(checkpoint)
        ckpttool.save(plain, "model.safetensors")

Importing this package imports nothing else: a name is looked up in its room when it is first used, and torch
and numpy are imported by the calls that need them. Every room is an attribute too: `ckpttool.digest.digest`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .checkpoint import Checkpoint as Checkpoint
    from .checkpoint import State as State
    from .errors import CkptToolError as CkptToolError
    from .formats import open as open
    from .formats import save as save
    from .keys import add_prefix as add_prefix
    from .keys import rename_keys as rename_keys
    from .keys import strip_prefix as strip_prefix
    from .reloading import reload as reload
    from .skeleton import skeletons as skeletons
    from .tensor import TensorRef as TensorRef
    from .transforms import drop as drop
    from .transforms import join_complex as join_complex
    from .transforms import select as select
    from .transforms import slim as slim
    from .transforms import split_complex as split_complex
    from .transforms import with_metadata as with_metadata

ROOMS = {
    "checkpoint": ("Checkpoint", "State"),
    "errors": ("CkptToolError",),
    "formats": ("open", "save"),
    "keys": ("add_prefix", "rename_keys", "strip_prefix"),
    "reloading": ("reload",),
    "skeleton": ("skeletons",),
    "tensor": ("TensorRef",),
    "transforms": ("drop", "join_complex", "select", "slim", "split_complex", "with_metadata"),
}
"""The public names by the rooms they live in; the type checker reads the same above."""

__all__ = [name for names in ROOMS.values() for name in names]


def __getattr__(name: str) -> object:
    room = next((room for room, names in ROOMS.items() if name in names), None)
    if room is not None:
        value: object = getattr(import_module(f".{room}", __name__), name)
        globals()[name] = value
        return value
    try:
        return import_module(f".{name}", __name__)
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
