"""The digest of a model (docs/digest.md), and the differences between two files."""

from __future__ import annotations

from collections.abc import Iterator

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.checksums import Checksums
from ..checkpoint.special_tensors import SpecialTensor, require_plain
from ..checkpoint.state import State
from ..errors import Refused, UsageFault
from ..files import digest as hashing
from ..files.copying import Progress
from ..formats.reading import File, opened
from ..tensors.dtypes import DTYPES
from ..tensors.ref import Computed, Storage, TensorRef
from . import compare as comparing
from .compare import Comparison
from .equality import Tolerance


def digest(
    file: File, *, state: str | None = None, verify: bool = True, progress: Progress | None = None
) -> str:
    """Return one SHA-256 for a model's names, types, shapes and values, the same in every format.

    docs/digest.md defines it.

    Args:
        file: a path, or an open checkpoint.
        state: dotted path of the model's state in the file; found when None.
        verify: compare what is read with the checksums that the file states.
        progress: called with the number of bytes after each piece.

    Returns:
        64 hexadecimal digits.

    Raises:
        NoState: the file has no model state, or none at `state`.
        Refused: a tensor has values in other files or is of a class that is not known, or an expanded tensor
            is more than 64 GiB larger than what the file holds of it.
        Unreadable, Damaged, Unsupported: as `ckpttool.open` raises them; Damaged also if the file ends early,
            or if `verify` and a checksum is wrong.
    """
    with opened(file) as checkpoint:
        chosen = checkpoint.state(state)
        used = [(name, tensor.storage) for name, tensor in chosen.tensors.items()] if verify else []
        with Checksums(checkpoint, used) as checksums:
            value = state_digest(checkpoint, chosen, progress)
            checksums.finish()
        return value


def diff(
    a: File,
    b: File,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    state: str | None = None,
    model_only: bool = False,
    ignore_prefix: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> Comparison:
    """Compare two checkpoints by contents, whatever their formats.

    Args:
        a, b: paths, or open checkpoints.
        rtol, atol: values are the same if |a - b| <= atol + rtol * |b|, as in `torch.allclose`; if both are
            None, if their bits are.
        state: dotted path of the model's state in both files, or in one of them; found when None. When it is
            given, only the states are compared.
        model_only: compare only the models' states.
        ignore_prefix: match names that differ only in wrappers' prefixes.
        verify: compare what is read with the checksums that the files state.
        progress: called with numbers of bytes, those of `a`.

    Returns:
        Names that only one file has, and what differs under a name of both: `.same`, `.only_a`, `.only_b`,
        `.changed` with distances, norms and cosines.

    Raises:
        UsageFault: a tolerance is negative or NaN.
        NoState: there is no model's state at `state`, or with `model_only` none at all.
        Unreadable, Damaged, Unsupported: as `ckpttool.open` raises them; Damaged also if a file ends early,
            or if `verify` and a checksum is wrong.
    """
    if not all(limit is None or limit >= 0 for limit in (rtol, atol)):
        raise UsageFault(f"a tolerance is a number from 0 on, not rtol={rtol}, atol={atol}")
    tolerance = None if rtol is None and atol is None else Tolerance(rtol or 0.0, atol or 0.0)
    with opened(a) as mine, opened(b) as theirs:
        return comparing.compare(
            mine,
            theirs,
            tolerance=tolerance,
            state=state,
            model_only=model_only,
            ignore_prefix=ignore_prefix,
            verify=verify,
            progress=progress,
        )


def state_digest(checkpoint: Checkpoint, state: State, progress: Progress | None = None) -> str:
    """Return the digest of a state, as 64 hexadecimal digits."""
    unsure = {name: like for name, like in state.likes.items() if like.is_piece or not like.known}
    require_plain(checkpoint.path, unsure, "have no digest: this file does not hold or show all their values")
    tensors = dict(state.tensors)
    for name, like in state.likes.items():
        for part, tensor in _parts(checkpoint.path, like):
            if f"{name}:{part}" in tensors:
                raise Refused(checkpoint.path, f"'{name}:{part}' is both a tensor and a part of one")
            tensors[f"{name}:{part}"] = tensor
    return hashing.digest(tensors, progress)


def _parts(path: str, like: SpecialTensor) -> Iterator[tuple[str, TensorRef]]:
    """Yield the parts of a tensor by name, and under an empty name its description as UTF-8."""
    text = str(like).encode()
    data = Computed(path, len(text), lambda start, nbytes: iter((memoryview(text)[start : start + nbytes],)))
    yield "", TensorRef.contiguous(Storage(data, "ByteStorage"), DTYPES["uint8"], (len(text),))
    yield from like.parts.items()
