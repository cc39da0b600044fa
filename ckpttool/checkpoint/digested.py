"""What the digest of a state covers: its tensors, and the parts of those that are not plain ones."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import Refused
from ..tensors.dtypes import DTYPES
from ..tensors.ref import Computed, TensorRef
from .special_tensors import SpecialTensor, require_plain
from .state import State


def with_parts(path: str, state: State) -> dict[str, TensorRef]:
    """Return the tensors of a state by name, with the parts that docs/digest.md names.

    Raises:
        Refused: the file does not hold all values of a tensor, or two would have one name.
    """
    unsure = {name: like for name, like in state.likes.items() if like.is_piece or not like.known}
    require_plain(path, unsure, "have no digest: this file does not hold or show all their values")
    tensors = dict(state.tensors)
    for name, like in state.likes.items():
        for part, tensor in _parts(path, like):
            if f"{name}:{part}" in tensors:
                raise Refused(path, f"'{name}:{part}' is both a tensor and a part of one")
            tensors[f"{name}:{part}"] = tensor
    return tensors


def _parts(path: str, like: SpecialTensor) -> Iterator[tuple[str, TensorRef]]:
    """Yield the parts of a tensor by name, and under an empty name its description as UTF-8."""
    text = str(like).encode()
    yield "", TensorRef.of_bytes(Computed.in_memory(path, text), DTYPES["uint8"], (len(text),))
    yield from like.parts.items()
