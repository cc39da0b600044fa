"""What a folder holds: the files of its checkpoint, and those beside it, which a model needs too or not."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from ...errors import CkptToolError, Damaged, UsageFault, already_exists
from ...rooms import need
from ..checkpoint.checkpoint import Checkpoint, not_read
from ..checkpoint.checksums import reads_of
from ..files.commit import replacing
from ..files.commit_folder import Replaced
from ..remote import places
from ..remote.urls import is_url
from ..system import join
from ..tensors.ref import Source
from . import shards

# torch.distributed.checkpoint's folders: their format, the file that tells of it, the ending of the rest.
DCP, METADATA, PART = "dcp", ".metadata", ".distcp"

NAMES = (shards.SAFETENSORS, shards.TORCH, DCP)

# The identity of a source, or the device and inode of a file.
File = tuple[object, object]

# Name endings that tell the format of a folder, in the order in which reading prefers them.
TELLING = (
    (METADATA, DCP),
    (PART, DCP),
    (f".safetensors{shards.INDEX}", shards.SAFETENSORS),
    (f".bin{shards.INDEX}", shards.TORCH),
)

# Name endings of files that an index may name as its own: it can't claim a `notes.txt`.
OF_TENSORS = (".safetensors", ".bin", ".pt", ".pth", PART)

# The small files that belong to a model, whoever saved it: its configuration, its tokenizer. Sources:
# transformers, diffusers, mistral.
COMPANIONS = (
    *("*config*.json", "*tokenizer*.json", "*.model", "*.tiktoken", "tekken.json", "params.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "special_tokens_map.json"),
    *("chat_template*", "*.jinja", "model_index.json", "README.md", "LICENSE*", "NOTICE*", "USE_POLICY*"),
    *("modeling_*.py", "configuration_*.py", "tokenization_*.py", "processing_*.py", "image_processing_*.py"),
)

# A folder below that of the ranks, in which trainers keep a model's configuration and tokenizer.
BELOW = "huggingface"


def kind_of(path: str) -> str | None:
    """Return the format of the checkpoint in a folder, judged by the names in it; None if there is none."""
    names = places.names_in(path)
    return next((kind for ending, kind in TELLING if any(name.endswith(ending) for name in names)), None)


def files_of_checkpoints(folder: str) -> list[str]:
    """Return the names of the files of all checkpoints in a folder."""
    # A file belongs to one only if its index or metadata names it, whatever its own name looks like.
    telling = (name for name in os.listdir(folder) if name == METADATA or name.endswith(shards.INDEX))
    return _with_named(folder, sorted(telling))


def _with_named(folder: str, telling: Collection[str], more: Collection[str] = ()) -> list[str]:
    """Return what indexes or DCP metadata name next to them, and more, and at the end themselves."""
    named = {file for name in telling for file in _named_by(join(folder, name))}
    return [*sorted(named.union(more).difference(telling)), *telling]


def _named_by(path: str) -> list[str]:
    """Return the files that an index or DCP metadata names next to it; none if it is damaged."""
    names: list[str] = []
    try:
        source = places.open_source_at(path)
        is_dcp = os.path.basename(path) == METADATA
        names = need("dcp.reading").file_names(source) if is_dcp else shards.shard_names(source)
    except CkptToolError as error:
        if isinstance(error.__cause__, OSError):  # what it names is not known, rather than nothing
            raise error.__cause__ from None
    return [name for name in names if name == os.path.basename(name) and name.endswith(OF_TENSORS)]


def replaced_by(checkpoint: Checkpoint, path: str) -> Replaced:
    """Return what tells the files that a checkpoint replaces when it is written to a folder."""
    if not is_in_place(checkpoint, path):
        return files_of_checkpoints
    telling = _names_of(path, {checkpoint.source.identity})
    read = _files_read(checkpoint)
    return lambda folder: _with_named(folder, telling, _names_of(folder, read))


def _names_of(folder: str, files: Collection[File | None]) -> list[str]:
    """Return the names that some files have in a folder."""
    return [name for name in os.listdir(folder) if identity_at(join(folder, name)) in files]


def companions(checkpoint: Checkpoint, path: str) -> list[str]:
    """Return the names of the other files that stay when a checkpoint replaces the one in its own folder."""
    # These are the files of a model on the Hugging Face Hub, such as its `config.json`, or another
    # checkpoint.
    if not is_in_place(checkpoint, path):
        return []
    read = _names_of(path, _files_read(checkpoint))
    names = sorted(name for name in os.listdir(path) if name not in read)
    return [name for name in names if os.path.isfile(join(path, name))]


def needed_beside(checkpoint: Checkpoint, path: str) -> set[File | str]:
    """Return the files of a checkpoint that stay needed when it is written to `path`.

    These are none if that is its own folder, and all but the file itself if a file takes the place of a lone
    one, or of the last of a chain of deltas. Files are known by device and inode, so links count too.
    """
    if is_in_place(checkpoint, path):
        return set()
    files = sources_of(checkpoint)
    if checkpoint.format not in NAMES and checkpoint.ranks is None and not os.path.isdir(path):
        files.discard(_known_by(checkpoint.source))
    return files


def sources_of(checkpoint: Checkpoint) -> set[File | str]:
    """Return all files that a checkpoint is read from: its own, and those that its values lie in."""
    values = {place.source for place in reads_of(checkpoint.storages())}
    return {*map(_known_by, values.union(checkpoint.sources))}


def _known_by(source: Source) -> File | str:
    return source.identity if source.is_local else source.place


def is_in_place(checkpoint: Checkpoint, path: str) -> bool:
    """Return whether a folder is the one that the checkpoint was read from."""
    source = folder_of(checkpoint) if checkpoint.format in NAMES else None
    return (
        source is not None and os.path.isdir(path) and places.identity_of(source) == places.identity_of(path)
    )


def is_same_file(source: Source, path: str) -> bool:
    """Return whether a path leads to an open file."""
    return path != "-" and source.identity == identity_at(path)


def not_copied(checkpoint: Checkpoint, path: str, kind: str) -> tuple[str, ...]:
    """Return the names of the other files of a folder, such as a `config.json`, that a new one won't have."""
    is_new = kind in NAMES and not is_in_place(checkpoint, path)
    return tuple(other_files(checkpoint, path)) if is_new else ()


def other_files(checkpoint: Checkpoint, path: str, folder: str | None = None) -> list[str]:
    """Return the names in the folder of a checkpoint that are no part of it, sorted."""
    if (home := folder or folder_of(checkpoint)) is None:
        return []
    read = _files_read(checkpoint)
    # In a folder below, as DeepSpeed has tags.
    own = {_first_below(home, place) for place in (path, *(source.place for source in checkpoint.sources))}
    names = (name for name in places.listed(home) if not name.startswith(".") and name not in own)
    names = (name for name in names if not_read(name) not in checkpoint.unread)
    return [name for name in names if identity_at(join(home, name)) not in read]


def _first_below(folder: str, path: str) -> str:
    """Return the name in a folder by which a path begins that leads into it."""
    if is_url(folder):
        return path.removeprefix(folder.rstrip("/") + "/").split("/")[0]
    return os.path.relpath(os.path.realpath(path), os.path.realpath(folder)).split(os.sep)[0]


def folder_of(checkpoint: Checkpoint) -> str | None:
    """Return the folder that a checkpoint was read from, perhaps by its index; None if it is a file."""
    if checkpoint.format not in NAMES and checkpoint.ranks is None:
        return None
    folder = checkpoint.path if places.is_folder(checkpoint.path) else os.path.dirname(checkpoint.path) or "."
    return folder if places.is_folder(folder) else None


def _files_read(checkpoint: Checkpoint) -> set[File | None]:
    return {source.identity for source in checkpoint.sources}


def identity_at(path: str) -> File | None:
    """Return the device and inode of what a path leads to; None if there is nothing."""
    try:
        facts = os.stat(path)
    except OSError as error:
        # It was removed meanwhile, or is a link that can't be followed.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES):
            return None
        raise
    return facts.st_dev, facts.st_ino


# What lies beside a checkpoint.


def listed_beside(
    checkpoint: Checkpoint, path: str, folder: str | None = None
) -> tuple[list[str], list[str]]:
    """Return what lies in a folder and in `huggingface/` there that is not read: companions, and the rest.

    `folder` is the one that the user named; else it is that of the checkpoint's index, if it has one.
    """
    if (folder := folder or folder_of(checkpoint)) is None:
        return [], []
    names = other_files(checkpoint, path, folder)
    below = join(folder, BELOW)
    if BELOW in names and places.is_folder(below) and not os.path.islink(below):
        inside = [name for name in places.listed(below) if not name.startswith(".")]
        names = [name for name in names if name != BELOW] + [join(BELOW, name) for name in inside]
    found = [name for name in names if _is_companion(folder, name)]
    # The latter serve a folder of DeepSpeed, and hold nothing themselves.
    others = [name for name in names if name not in (*found, "latest", "zero_to_fp32.py", "zero_to_torch.py")]
    rest = [
        name if places.is_inside(folder, name) else f"{name} (a link out of the folder)" for name in others
    ]
    return [join(folder, name) for name in found], rest


def _is_companion(folder: str, name: str) -> bool:
    path, base = join(folder, name), os.path.basename(name)
    is_known = any(fnmatchcase(base, pattern) for pattern in COMPANIONS) and not base.endswith(shards.INDEX)
    # Tokenizers have up to 40 MB.
    is_small = is_known and places.is_file(path) and places.nbytes_of(path) <= 100_000_000
    return is_small and places.is_inside(folder, name)


def companion_targets(paths: Sequence[str], output: str, *, is_folder: bool, force: bool) -> dict[str, str]:
    """Return where each companion is copied to: into an output that is a folder, else next to it."""
    folder = output if is_folder else os.path.dirname(output) or "."
    sources: dict[str, str] = {}
    for path in paths:
        target = join(folder, os.path.basename(path))
        if (other := sources.setdefault(target, path)) != path:
            what = f"{other} and {path} would both become {target}"
            raise UsageFault(what, hint="copy one by hand, without --companions")
    for target, path in sources.items():
        if not force and os.path.lexists(target) and not _is_same(path, target):
            raise already_exists(target)
    return {path: target for target, path in sources.items()}


def copy_companions(
    targets: Mapping[str, str], settings: Mapping[str, object] | None = None, *, force: bool
) -> None:
    """Copy each companion to its place, whole or not at all; a config.json with these settings changed.

    A setting inside another has a dotted name, and is changed where that is there. One of None is taken out.
    Without `force` only an equal file is replaced.
    """
    for path, place in targets.items():
        own = settings if os.path.basename(path) == "config.json" else None
        content = _corrected(path, own) if own else _bytes_of(path)
        is_free = not (force or is_url(place) or _is_same(path, place))
        with places.uploading(place, replace=True) as local, replacing(local, exclusive=is_free) as file:
            file.write(content)


def _corrected(path: str, settings: Mapping[str, object]) -> bytes:
    try:
        said = {**json.loads(_bytes_of(path))}
        for name, value in settings.items():
            outer, _, last = name.rpartition(".")
            if isinstance(of := said.get(outer) if outer else said, dict):
                of[last] = value
                if value is None:
                    del of[last]
        return f"{json.dumps(said, indent=2)}\n".encode()
    except (ValueError, TypeError, RecursionError):
        raise Damaged(path, "is no JSON object") from None


def _is_same(path: str, target: str) -> bool:
    return os.path.isfile(target) and _bytes_of(path) == _bytes_of(target)


def _bytes_of(path: str) -> bytes:
    source = places.open_source_at(path)
    return source.read(0, source.size)
