"""From files to a file, as the commands of the same names do: `convert` and `merge`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.selection import cast, drop, select
from ..tensors.cast import target
from ..words import first_few
from .destination import Saved, destination
from .reading import File, opened
from .saving import save
from .shards import piece_of


def convert(
    file: File,
    path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    only: Iterable[str] = (),
    exclude: Iterable[str] = (),
    leave_out: Iterable[str] = (),
    state: str | None = None,
    to: str | None = None,
    full: bool = False,
    shard_size: int | None = None,
    force: bool = False,
) -> Saved:
    """Write a checkpoint in another format, without running anything in it.

    A file that is one of several, as `model-00001-of-00005.safetensors`, is converted alone; a UserWarning
    names the rest, and what makes the whole.

    Args:
        file: a path, or an open checkpoint.
        path: the output, whose name says the format: `.safetensors`, `.pt`, or a folder of shards with `/`.
        dtype: what floating-point tensors of the model are cast to: `bf16`, `fp16`, `fp32` or `fp64`.
        only, exclude: shell patterns of the keys to keep, and of those to leave out.
        leave_out: dotted names of other contents to leave out, such as `optimizer`.
        state: dotted path of the model's state; found when None.
        to: the format, whatever the name: `torch-zip`, `safetensors`, `safetensors-sharded`,
            `torch-sharded`, `dcp`.
        full: keep everything, also in safetensors.
        shard_size: the most bytes of a shard; 5 GB when None.
        force: replace an existing output.

    Returns:
        What was written, and by name what was not.

    Raises:
        OutputExists: there is something at `path`, and `force` is not set.
        UsageFault: the name says no format, or `dtype` is none.
        NothingToDo: no key matches, or no tensor would be cast.
        NoState: there is no model's state, or none at `state`.
        Refused: the format can't hold something.
        Unreadable, Damaged, Unsupported: as `ckpttool.open` raises them.

    Example:
        >>> saved = ckpttool.convert("last.pt", "half.safetensors", dtype="bf16")
        >>> saved.keys, saved.left_out
        (7, ('optimizer', 'epoch'))
    """
    only, exclude, leave_out = tuple(only), tuple(exclude), tuple(leave_out)
    with opened(file) as checkpoint:
        if not isinstance(file, Checkpoint) and (piece := piece_of(os.fspath(file))) is not None:
            warnings.warn(piece.warning(first_few), stacklevel=2)
        if leave_out:
            checkpoint = drop(checkpoint, leave_out)
        if only or exclude:
            checkpoint, _ = select(checkpoint, only=only, exclude=exclude, state=state)
        if dtype is not None:
            checkpoint, _ = cast(checkpoint, target(dtype.lower()), state=state)
        kind = destination(os.fspath(path), checkpoint, to, full=full, keep=to is None).format
        return save(
            checkpoint, path, state=state, to=kind, full=full or None, shard_size=shard_size, force=force
        )
