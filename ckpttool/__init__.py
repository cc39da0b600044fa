"""ckpttool: a workbench for PyTorch checkpoints.

    import ckpttool

    with ckpttool.open("last.pt") as checkpoint:        # no torch, nothing executed, nothing loaded
        state = checkpoint.state()                      # names, dtypes, shapes
        print(state.where, len(state.tensors))
    ckpttool.reload("last.pt", model)                   # strictly, into a plain torch module

The public names are loaded when they are first used, so that `import ckpttool` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import Checkpoint as Checkpoint
    from .checkpoint import State as State
    from .errors import CkptToolError as CkptToolError
    from .formats import open as open
    from .formats import save as save
    from .keys import add_prefix as add_prefix
    from .keys import strip_prefix as strip_prefix
    from .reload import reload as reload
    from .tensor import TensorRef as TensorRef

__version__ = "0.1.0"

_HOMES = {
    "Checkpoint": "checkpoint",
    "CkptToolError": "errors",
    "State": "checkpoint",
    "TensorRef": "tensor",
    "add_prefix": "keys",
    "open": "formats",
    "reload": "reload",
    "save": "formats",
    "strip_prefix": "keys",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ckpttool' has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
