"""Deltas applied to a base: nothing counts before the base, and what comes of it, have their digests."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.checksums import require_made
from ...errors import Damaged, Refused, UsageFault
from ...files.copying import Progress
from ...remote import places
from ...remote.urls import canonical
from ..reading import open as open_any
from ..reading import open_alone
from .digests import digests_of
from .header import Digests, read_header
from .reading import LONGEST, Link, agree, joined, wrong_base

Path = str | os.PathLike[str]


def apply(
    base: Path,
    deltas: Sequence[Path],
    *,
    progress: Progress | None = None,
    expect: Progress | None = None,
) -> Checkpoint:
    """Return what deltas make of a base, checked: save it, or read it, while it is open.

    `ckpttool.open("BASE+DELTA")` is the same without the digests: there the checksums of what is read are
    compared when it is read.

    Args:
        base: the checkpoint that the first delta was made from, in any format.
        deltas: files of `ckpttool.delta`, in the order in which they were made.
        progress: called with the number of bytes after each piece: the base is read once, and what the deltas
            make of it is made once.
        expect: called first, with the number of bytes that progress will come to.

    Raises:
        Refused: the base, or what comes of it by the deltas so far, is not what a delta was made from; or a
            file is no delta.
        Damaged: what comes of them is not what the last delta was made from; or a delta breaks the rules.
        UsageFault: there are no deltas, or more than 64.
        Unreadable, Unsupported: as `ckpttool.open` raises them; Unsupported also where zstd is missing.

    Example:
        >>> made = ckpttool.delta("model.safetensors", "tuned.safetensors", "step.delta.safetensors")
        >>> with ckpttool.apply("model.safetensors", ["step.delta.safetensors"]) as newer:
        ...     ckpttool.digest(newer) == ckpttool.digest("tuned.safetensors")
        True
    """
    if not 0 < len(deltas) <= LONGEST:
        raise UsageFault(f"{len(deltas)} deltas were given", hint=f"name from 1 to {LONGEST}")
    names = [canonical(os.fspath(path)) for path in deltas]
    with places.visit():
        first = open_any(base)
        files = [open_alone(name) for name in names]
    link = Link(first)
    for file in files:
        link = joined(link, file)
    source = files[-1].source.called("+".join([first.path, *names]))
    sources = (first.source, *first.shards, *(file.source for file in files))
    made = replace(link.checkpoint, source=source, shards=sources)
    require_made(made.storages())
    _require_digests(first, files, made, progress or _nothing, expect or _nothing)
    return made


def _nothing(count: int) -> None:
    pass


def _require_digests(
    base: Checkpoint,
    files: Sequence[Checkpoint],
    made: Checkpoint,
    progress: Progress,
    expect: Callable[[int], object],
) -> None:
    """Compare a base, and what deltas make of it, with the digests that these state."""
    first, last = read_header(files[0]), read_header(files[-1])
    expect(base.nbytes + sum(entry.nbytes for entry in last.tensors.values()))
    try:
        found = digests_of(base, whole=first.base.digests.whole is not None, progress=progress)
    except Refused:  # it has no digest, as its values are elsewhere
        found = Digests(None, None)
    if not agree(first.base.digests, found):
        raise wrong_base(base.path, files[0].path, first.base, found.shown)
    if digests_of(made, whole=True, progress=progress) != last.new:
        what = "does not make the checkpoint that it was made from: its digest differs"
        raise Damaged(files[-1].path, what, hint="copy the delta again")
