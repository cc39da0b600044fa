"""Deltas applied to a base: nothing counts before the base, and what comes of it, are what they state."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..core.checkpoint import full
from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.checksums import Checksums, require_made
from ..core.files.digest import tensor_digests
from ..core.files.threads import Progress
from ..core.formats import safetensors
from ..core.formats.reading import open as open_any
from ..core.formats.reading import open_alone
from ..core.remote.places import visit
from ..core.remote.urls import canonical
from ..errors import UsageFault
from . import versions
from .forms import FORMS, number_in
from .header import ENTRY, read_header
from .reading import LONGEST, DeltaLink, joined, wrong_base
from .writing import digest_of_state

Path = str | os.PathLike[str]


def apply(
    base: Path,
    deltas: Sequence[Path] = (),
    *,
    version: int | None = None,
    lazily: bool = False,
    progress: Progress | None = None,
    expect: Progress | None = None,
) -> Checkpoint:
    """Return a base with deltas applied to it, checked: save it, or read it, while it is open.

    `ckpttool.open("BASE+DELTA")` is the same without the digests: there the checksums of what is read are
    compared when it is read.

    Args:
        base: the checkpoint that the first delta was made from, in any format; or a folder of versions.
        deltas: files of `ckpttool.delta`, in the order in which they were made; or a folder of versions.
        version: which one of that folder; the newest when None.
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
            Unreadable also where a version is missing, or can't be read, that another is made from.

    Example:
        >>> made = ckpttool.delta("model.safetensors", "tuned.safetensors", "step.delta.safetensors")
        >>> with ckpttool.apply("model.safetensors", ["step.delta.safetensors"]) as newer:
        ...     ckpttool.digest(newer) == ckpttool.digest("tuned.safetensors")
        True
    """
    given = [canonical(os.fspath(path)) for path in (base, *deltas)]
    base, *names = versions.expanded(given, version)
    if not names and [base] != given:
        return open_any(base)
    if not 0 < len(names) <= LONGEST:
        raise UsageFault(f"{len(names)} deltas were given", hint=f"name from 1 to {LONGEST}")
    with visit():
        first = open_any(base)
        files = [open_alone(name) for name in names]
    links = [DeltaLink(first, version=number_in(first.path, names[0]))]
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
        if any(file.format in FORMS for file in files):  # which compare values while they are made
            dict(tensor_digests(dict(made.tensors()), None))
    return made


def false_digests(made: Checkpoint, progress: Progress | None) -> Iterator[tuple[str, str]]:
    """Yield the tensors of which a delta states another digest than they have, and how that is said.

    Last comes the state of the model, if its digest is another.
    """
    source = made.shards[-1]
    flat = full.encode_entry(made.path, made.tree, made.protocol)
    file = safetensors.read(source) if safetensors.sniff(source.read(0, min(9, source.size))) else None
    if file is None or ENTRY not in file.metadata or file.format in FORMS:
        dict(tensor_digests(flat.tensors, progress))  # raises what is wrong
        return
    header = read_header(file)
    values = {name: value.decode() for name, value in tensor_digests(flat.tensors, progress)}
    for name, entry in header.tensors.items():
        if values.get(name) != entry.digest:
            yield name, f"its bytes do not match their digest (in {source.path})"
    found = made.found_state()
    if header.digest not in (None, digest_of_state(made, flat.tensors, values, progress)):
        yield found.where if found else "", f"has another digest than {source.path} states"
