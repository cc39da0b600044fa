"""The digest of a model's state, with the tensors in it that are not plain ones (docs/digest.md)."""

from __future__ import annotations

from collections.abc import Iterator

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.special_tensors import SpecialTensor, require_plain
from ..checkpoint.state import State
from ..errors import Refused
from ..files.copying import Progress
from ..files.digest import digest
from ..tensors.dtypes import DTYPES
from ..tensors.ref import Computed, Storage, TensorRef


def state_digest(checkpoint: Checkpoint, state: State, progress: Progress | None = None) -> str:
    """Return the digest of a state, as 64 hexadecimal digits.

    Args:
        checkpoint: the file.
        state: a state of it.
        progress: called with the number of bytes after each piece.

    Raises:
        Refused: a tensor has values in other files (sharded, ZeRO-3), or is of a class that is not known; or
            an expanded tensor is more than 64 GiB larger than what the file holds of it.
        Damaged: a file ends early.
    """
    unsure = {name: like for name, like in state.likes.items() if like.is_piece or not like.known}
    require_plain(checkpoint.path, unsure, "have no digest: this file does not hold or show all their values")
    tensors = dict(state.tensors)
    for name, like in state.likes.items():
        for part, tensor in _parts(checkpoint.path, like):
            if f"{name}:{part}" in tensors:
                raise Refused(checkpoint.path, f"'{name}:{part}' is both a tensor and a part of one")
            tensors[f"{name}:{part}"] = tensor
    return digest(tensors, progress)


def _parts(path: str, like: SpecialTensor) -> Iterator[tuple[str, TensorRef]]:
    """Yield the parts of a tensor by name, and under an empty name its description as UTF-8."""
    text = str(like).encode()
    data = Computed(path, len(text), lambda start, nbytes: iter((memoryview(text)[start : start + nbytes],)))
    yield "", TensorRef.contiguous(Storage(data, "ByteStorage"), DTYPES["uint8"], (len(text),))
    yield from like.parts.items()
