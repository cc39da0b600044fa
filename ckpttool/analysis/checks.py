"""The digest of a model: docs/digest.md defines it."""

from __future__ import annotations

from ..checkpoint.checksums import Checksums, expect
from ..checkpoint.digested import with_parts
from ..files import digest as hashing
from ..files.pieces import Progress
from ..formats.reading import File, opened


def digest(
    file: File,
    *,
    state: str | None = None,
    verify: bool = True,
    progress: Progress | None = None,
    known: hashing.Known | None = None,
) -> str:
    """Return one SHA-256 for a model's names, types, shapes and values, the same in every format.

    docs/digest.md defines it.

    Args:
        file: a path, or an open checkpoint.
        state: dotted path of the model's state in the file; found when None.
        verify: compare what is read with the checksums that the file states.
        progress: called with the number of bytes after each piece.
        known: digests of tensors in files whose hash a server tells, from calls before; gets those of this.

    Returns:
        64 hexadecimal digits.

    Raises:
        NoState: the file has no model state, or none at `state`.
        Refused: a tensor has values in other files or is of a class that is not known, or an expanded tensor
            is more than 64 GiB larger than what the file holds of it.
        Unreadable, Damaged, Unsupported: as `ckpttool.open` raises them; Damaged also if the file ends early,
            or if `verify` and a checksum is wrong.

    Example:
        >>> saved = ckpttool.convert("model.safetensors", "copy.pt")
        >>> ckpttool.digest("copy.pt") == ckpttool.digest("model.safetensors")
        True
    """
    with opened(file) as checkpoint:
        chosen = checkpoint.state(state)
        used = [(name, tensor.storage) for name, tensor in sorted(chosen.tensors.items())]
        expect(used)
        with Checksums(checkpoint, used if verify else []) as checksums:
            value = hashing.digest(with_parts(checkpoint.path, chosen), progress, known)
            checksums.finish()
        return value
