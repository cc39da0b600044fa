"""What a folder holds: the format of its checkpoint, the files that belong to one, and those that don't."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection

from ..checkpoint.checkpoint import Checkpoint
from ..errors import CkptToolError
from ..files.commit_folder import Replaced, others_in
from ..files.open_source import names_in, open_source_descriptor
from ..tensors.ref import ByteRange, Source
from .dcp import reading as dcp
from .dcp.tree import not_read
from .shards import reading as sharded
from .shards import writing as sharding

NAMES = (sharding.SAFETENSORS, sharding.TORCH, dcp.NAME)

# Name endings that tell the format of a folder, in the order in which reading prefers them.
TELLING = (
    (dcp.METADATA, dcp.NAME),
    (dcp.ENDING, dcp.NAME),
    (f".safetensors{sharding.INDEX}", sharding.SAFETENSORS),
    (f".bin{sharding.INDEX}", sharding.TORCH),
)

# Name endings of files that an index may name as its own: it can't claim a `notes.txt`.
OF_TENSORS = (".safetensors", ".bin", ".pt", ".pth", dcp.ENDING)

# What the system says of a file that was removed meanwhile, and of a link that can't be followed.
LEADS_NOWHERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES}


def kind_of(path: str) -> str | None:
    """Return the format of the checkpoint in a folder, judged by the names in it; None if there is none."""
    names = names_in(path)
    return next((kind for ending, kind in TELLING if any(name.endswith(ending) for name in names)), None)


def files_of_checkpoints(folder: str) -> list[str]:
    """Return the names of the files of all checkpoints in a folder."""
    # A file belongs to one only if its index or metadata names it, whatever its own name looks like.
    telling = sorted(
        name for name in os.listdir(folder) if name == dcp.METADATA or name.endswith(sharding.INDEX)
    )
    named = {file for name in telling for file in _named_by(os.path.join(folder, name))}
    return [*sorted(named.difference(telling)), *telling]


def _named_by(path: str) -> list[str]:
    """Return the files that an index or DCP metadata names next to it; none if it is damaged."""
    names: list[str] = []
    try:
        source = Source(path, open_source_descriptor(path))
        is_dcp = os.path.basename(path) == dcp.METADATA
        names = dcp.file_names(source) if is_dcp else sharded.shard_names(source)
    except CkptToolError as error:
        if isinstance(error.__cause__, OSError):  # what it names is not known, rather than nothing
            raise error.__cause__ from None
    return [name for name in names if name == os.path.basename(name) and name.endswith(OF_TENSORS)]


def replaced_by(checkpoint: Checkpoint, path: str) -> Replaced:
    """Return what tells the files that a checkpoint replaces when it is written to a folder."""
    if not is_in_place(checkpoint, path):
        return files_of_checkpoints
    identity = _identity(os.fstat(checkpoint.source.fd))
    telling = [name for name in os.listdir(path) if _identity_of(os.path.join(path, name)) == identity]
    read = _files_read(checkpoint)

    def replaced(folder: str) -> list[str]:
        files_read = {name for name in os.listdir(folder) if _identity_of(os.path.join(folder, name)) in read}
        named = {file for name in telling for file in _named_by(os.path.join(folder, name))}
        return [*sorted((files_read | named).difference(telling)), *telling]

    return replaced


def others(checkpoint: Checkpoint, path: str, kept: Collection[str]) -> list[str]:
    """Return the names of what keeps a folder from being replaced: neither replaced nor kept, sorted."""
    return others_in(path, {*replaced_by(checkpoint, path)(path), *companions(checkpoint, path), *kept})


def companions(checkpoint: Checkpoint, path: str) -> list[str]:
    """Return the names of the other files that stay when a checkpoint replaces the one in its own folder."""
    # These are the files of a model on the Hugging Face Hub, such as its `config.json`, or another
    # checkpoint.
    if not is_in_place(checkpoint, path):
        return []
    read = _files_read(checkpoint)
    files = {name: place for name in os.listdir(path) if os.path.isfile(place := os.path.join(path, name))}
    return sorted(name for name, place in files.items() if _identity_of(place) not in read)


def is_part_of_input(checkpoint: Checkpoint, path: str) -> bool:
    """Return whether replacing `path` would destroy a part of what is read."""
    # Files are compared by device and inode, so other names of them (links) count too.
    if os.path.isdir(path):
        if is_in_place(checkpoint, path):
            return False
        replaced = {_identity_of(os.path.join(path, name)) for name in files_of_checkpoints(path)}
        return bool(replaced & _files_read(checkpoint))
    identity = _identity_of(path)
    if identity is None:
        return False
    if (checkpoint.format in NAMES or checkpoint.ranks) and identity in _files_read(checkpoint):
        return True
    folder, name = os.path.split(os.path.realpath(path))
    return identity in _files_referred(checkpoint) and name in files_of_checkpoints(folder)


def is_in_place(checkpoint: Checkpoint, path: str) -> bool:
    """Return whether a folder is the one that the checkpoint was read from."""
    source = folder_of(checkpoint) if checkpoint.format in NAMES else None
    return source is not None and os.path.isdir(path) and os.path.samefile(source, path)


def not_copied(checkpoint: Checkpoint, path: str, kind: str) -> tuple[str, ...]:
    """Return the names of the other files of a folder, such as a `config.json`, that a new one won't have."""
    if kind not in NAMES or is_in_place(checkpoint, path):
        return ()
    return tuple(other_files(checkpoint, path))


def other_files(checkpoint: Checkpoint, path: str, folder: str | None = None) -> list[str]:
    """Return the names in the folder of a checkpoint that are no part of it, sorted."""
    source = folder or folder_of(checkpoint)
    if source is None:
        return []
    read = _files_read(checkpoint)
    top = os.path.realpath(source)
    places = [path, *(shard.path for shard in checkpoint.shards)]  # in a folder below, as DeepSpeed has tags
    own = {os.path.relpath(os.path.realpath(place), top).split(os.sep)[0] for place in places}
    others = sorted(os.listdir(source))
    told = {name for name in others if not_read(name) in checkpoint.unread}
    found = [name for name in others if not name.startswith(".") and name not in own | told]
    return [name for name in found if _identity_of(os.path.join(source, name)) not in read]


def folder_of(checkpoint: Checkpoint) -> str | None:
    """Return the folder that a checkpoint was read from, perhaps by its index; None if it is a file."""
    if checkpoint.format not in NAMES and checkpoint.ranks is None:
        return None
    folder = checkpoint.path if os.path.isdir(checkpoint.path) else os.path.dirname(checkpoint.path) or "."
    return folder if os.path.isdir(folder) else None


def _files_referred(checkpoint: Checkpoint) -> set[tuple[int, int] | None]:
    """Return the files in which the bytes of a checkpoint lie, other than the one it was read from."""
    sources: dict[int, Source] = {}
    seen: set[int] = set()
    storages = [storage for _, storage in checkpoint.storages()]
    while storages:
        storage = storages.pop()
        if id(storage) not in seen:
            seen.add(id(storage))
            storages.extend(storage.origins)
            if isinstance(storage.data, ByteRange) and storage.data.source is not checkpoint.source:
                sources[id(storage.data.source)] = storage.data.source
    return {_identity(os.fstat(source.fd)) for source in sources.values()}


def _files_read(checkpoint: Checkpoint) -> set[tuple[int, int] | None]:
    return {_identity(os.fstat(source.fd)) for source in (checkpoint.source, *checkpoint.shards)}


def _identity_of(path: str) -> tuple[int, int] | None:
    try:
        return _identity(os.stat(path))
    except OSError as error:
        if error.errno in LEADS_NOWHERE:
            return None
        raise


def _identity(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_dev, facts.st_ino
