"""Deltas applied to a base: nothing counts before the base, and what comes of it, are what they state."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.checksums import Checksums, require_made
from ...errors import UsageFault
from ...files.pieces import Progress
from ...remote.urls import canonical
from ...remote.visit import visit
from ..reading import open as open_any
from ..reading import open_alone
from .header import read_header
from .reading import LONGEST, DeltaLink, joined, wrong_base

Path = str | os.PathLike[str]


def apply(
    base: Path,
    deltas: Sequence[Path],
    *,
    lazily: bool = False,
    progress: Progress | None = None,
    expect: Progress | None = None,
) -> Checkpoint:
    """Return a base with deltas applied to it, checked: save it, or read it, while it is open.

    `ckpttool.open("BASE+DELTA")` is the same without the digests: there the checksums of what is read are
    compared when it is read.

    Args:
        base: the checkpoint that the first delta was made from, in any format.
        deltas: files of `ckpttool.delta`, in the order in which they were made.
        lazily: compare the base now, and the digest of what comes of it in the pass that saves it, which
            raises Damaged before it counts. Otherwise both are compared now, and the second again when it is
            saved.
        progress: called with the number of bytes after each piece that is read, or made.
        expect: called first, with the number of bytes that progress will come to.

    Raises:
        Refused: the base is not what the first delta was made from; or a file is no delta, or one of
            something else.
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
    with visit():
        first = open_any(base)
        files = [open_alone(name) for name in names]
    links = [DeltaLink(first)]
    for file in files:
        links.append(joined(links[-1], file, digests=file is files[-1]))
    source = files[-1].source.called("+".join([first.path, *names]))
    sources = (*first.sources, *(file.source for file in files))
    made = replace(links[-1].checkpoint, source=source, shards=sources)
    require_made(made.storages())
    taken = {id(storage): storage.nbytes for _, storage in links[1].taken}
    wholes = {} if lazily else {id(storage): storage.nbytes for _, storage in made.storages()}
    if expect is not None:
        expect(sum(taken.values()) + sum(wholes.values()))
    with Checksums(first, links[1].taken) as of_base:
        for name, _ in of_base.damaged(progress):
            raise wrong_base(
                first.path, files[0].path, read_header(files[0]), f"'{name[:80]}' has other values"
            )
    for _, storage in links[1].taken:
        storage.crc32 = None  # not to be summed again: what comes of it has a digest
    if not lazily:
        with Checksums(made, made.storages()) as of_made:
            of_made.finish(progress)
    return made
