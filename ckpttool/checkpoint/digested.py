"""Digests of what is in a state: its tensors with the parts of special ones, and any other value."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from ..errors import Refused
from ..files.digest import digest
from ..inert_pickle.values import TooDeep
from ..tensors.dtypes import DTYPES
from ..tensors.ref import Computed, TensorRef
from .dotted_names import TooManyNames
from .full_encoding import Unholdable, encode
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


def digest_of_value(value: object) -> str | None:
    """Return the digest of any value, such as a number; None where `--full` could not hold it."""
    try:
        flat = encode(value)
    except (TooDeep, TooManyNames, Unholdable):
        return None
    return hashlib.sha256(f"{digest(flat.tensors)}{flat.text}".encode()).hexdigest()


def _parts(path: str, like: SpecialTensor) -> Iterator[tuple[str, TensorRef]]:
    """Yield the parts of a tensor by name, and under an empty name its description as UTF-8."""
    text = str(like).encode()
    yield "", TensorRef.of_bytes(Computed.in_memory(path, text), DTYPES["uint8"], (len(text),))
    yield from like.parts.items()
