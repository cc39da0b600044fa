"""Names in a pickle that are understood, and those that are not."""

from __future__ import annotations

from ..tensors.dtypes import DTYPES
from .values import WRAPPERS, Global, walk

# Names of ordinary files that are understood here, or that are plain data.
UNDERSTOOD = {
    *(str(name) for name in WRAPPERS),
    *(f"torch.{name}" for name in DTYPES),
    "_codecs.encode",
    "collections.OrderedDict",
    "torch.Size",
    "torch.Tensor",
    "torch.device",
    *(
        f"{module}.{name}"
        for module in ("builtins", "__builtin__")
        for name in ("set", "frozenset", "complex", "bytes", "bytearray", "slice", "range")
    ),
}


def unknown_names(tree: object) -> list[str]:
    """Return every name in a tree that is not understood, sorted."""
    names = {str(value) for value in walk(tree) if isinstance(value, Global)}
    return sorted(names - UNDERSTOOD)
