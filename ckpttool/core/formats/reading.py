"""Opening a checkpoint: its format is found by content, never by name."""

from __future__ import annotations

import gc
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from ...errors import Damaged, Unreadable, Unsupported
from ...rooms import find, need
from ..checkpoint.checkpoint import Checkpoint
from ..files.commit import OF_MACOS, allow_open_files, reason
from ..files.commit_folder import set_aside, unmoved
from ..remote.places import exists, is_folder, listed, names_in, open_source_at, visit
from ..remote.urls import canonical
from ..system import join
from ..tensors.ref import Source
from . import shards
from .folders import METADATA, PART
from .safetensors import DELTA
from .shards import INDEX, alone_among
from .strangers import head_of, stranger, stranger_folder

# The first three begin as zips do, and are told apart by their first record.
READERS = (
    *("arrays.reading", "core.formats.pytorch.exported", "core.formats.pytorch.zip"),
    *("core.formats.pytorch.legacy", "core.formats.safetensors", "core.formats.pytorch.tar"),
    *("dcp.reading", "core.formats.shards", "gguf.reading", "onnx.reading"),
)
"""The modules with `sniff` and `read` of each format, asked in turn and imported only then."""

# Files that say what is in a folder, in the order of preference; other indexes come after these.
IN_FOLDERS: tuple[str, ...] = (METADATA, "model.safetensors.index.json", "pytorch_model.bin.index.json")

MANY = 20_000
"""Objects; the collector searches fewer in a millisecond or two."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector: it would search the many objects of a large file, all of them in use."""
    was_running, before = gc.isenabled(), gc.get_count()[0]
    gc.disable()
    try:
        yield
    finally:
        if was_running:
            # What the caller has frozen stays so. To count that takes as long as to search it: not for few.
            if gc.get_count()[0] - before > MANY and not gc.get_freeze_count():
                gc.freeze()  # and back: all objects become old ones, which the next collection passes over
                gc.unfreeze()
            gc.enable()


def open(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint and read all of it but the values of tensors.

    Nothing that the file names is imported or run, and torch is not needed.

    Args:
        path: a file of torch, safetensors, GGUF, ONNX or NumPy, whatever its name; the index or the folder
            of a sharded checkpoint; a DCP folder; a folder with a file of each rank, or with one
            model.safetensors, pytorch_model.bin or adapter_model.safetensors; `-` is stdin; a delta whose
            base lies beside it; or `BASE+DELTA…`, a base and the deltas to apply to it. A URL (https, hf, s3,
            gs, az) does wherever a path does.

    Returns:
        The checkpoint, whose files stay open; use it as a context manager, or let it go.

    Raises:
        Unreadable: there is no such file, it may not be read, or it is a folder without a checkpoint.
        Damaged: it claims a format and breaks its rules.
        Unsupported: it is something else, or in a format that is not read here.

    Example:
        >>> with ckpttool.open("last.pt") as checkpoint:
        ...     [name for name, tensor in checkpoint.state().items() if tensor.dtype.name == "int64"]
        ['module.1.num_batches_tracked']
    """
    with visit():
        return ready(_open(os.fspath(path)))


def open_alone(path: str) -> Checkpoint:
    """Open one checkpoint, a delta as the file of tensors that it is."""
    with visit():
        return ready(_open_alone(path))


def ready(checkpoint: Checkpoint) -> Checkpoint:
    """Let go of what was read to open a checkpoint: from now on values are read."""
    for source in checkpoint.sources:
        source.opened()
    return checkpoint


def _open(name: str) -> Checkpoint:
    """Open a checkpoint; what deltas make of one if it is a delta, or the name is `BASE+DELTA…`."""
    deltas = find("deltas.reading") if "+" in name else None
    first, *others = map(canonical, deltas.split(name) if deltas else [name])
    checkpoint = _open_alone(first)
    if not others and DELTA not in checkpoint.metadata:
        return checkpoint
    name = "+".join([first, *others])
    chained: Checkpoint = need("deltas.reading").chained(name, checkpoint, others, _open_alone)
    return chained


def _open_alone(name: str) -> Checkpoint:
    if is_folder(name):
        only = _only_file(name)
        return _open_in(name, name) if only is None or is_folder(only) else _open_alone(only)
    if os.path.basename(name) == METADATA or name.endswith(INDEX):
        return _open_in(name, os.path.dirname(name) or ".")
    if old := set_aside(name):
        what = "its replacement was interrupted, and its old contents are still next to it"
        raise Unreadable(name, what, hint=f"put them back: mv {shlex.quote(old)} {shlex.quote(name)}")
    allow_open_files(1, name)
    source = open_source_at(name)
    folder = os.path.dirname(name)
    try:
        if not name.endswith(PART):  # which begins like a file of torch.save, and may be one tensor
            return read(source)
    except (Damaged, Unsupported):
        if not exists(join(folder, METADATA)):
            raise
    hint = f"name the folder: {shlex.quote(folder or '.')}"
    raise Unsupported(name, "is a part of a DCP folder, not a file of its own", hint=hint)


def _only_file(folder: str) -> str | None:
    """Return the model's file in a folder without an index, as transformers finds it; None in any other."""
    names = names_in(folder)
    alone = alone_among(names)
    has_index = any(name.endswith((INDEX, METADATA)) for name in names)
    return join(folder, alone[0]) if len(alone) == 1 and not has_index else None


def _open_in(name: str, folder: str) -> Checkpoint:
    """Open the files of a folder, all from the same one if it is replaced meanwhile."""
    return unmoved(folder, lambda: _read_folder(name) if is_folder(name) else read_telling(name, name))


@collector_paused()
def _read_folder(name: str) -> Checkpoint:
    """Read a folder by the file that says what is in it, and by what ranks wrote where that is not all."""
    try:
        names = [file for file in listed(name) if not file.startswith(OF_MACOS)]
    except OSError as error:
        raise Unreadable(name, reason(error)) from error
    deltas = find("deltas.forms") if shards.MANIFESTS & {*names} else None
    if deltas and (patch := deltas.of_folder(name, names)):
        return cast(Checkpoint, patch)
    telling = _telling(name, names)
    if telling in (None, METADATA):
        ranks = find("ranks.frameworks")
        if ranks and (checkpoint := ranks.read_folder(name)):
            return cast(Checkpoint, checkpoint)
    if telling is not None:
        return read_telling(name, join(name, telling))
    if checkpoint := shards.without_index(name, names):
        return checkpoint
    if fault := stranger_folder(name, names):
        raise fault
    from .roots import nothing_known

    raise nothing_known(name, names, open_alone)  # a base that is a folder with its delta would have no end


def read_telling(name: str, telling: str) -> Checkpoint:
    try:
        return read(open_source_at(telling, shown=name))
    except (Damaged, Unsupported) as fault:
        if fault.path != name or os.path.basename(telling) != METADATA:
            raise
        raise type(fault)(telling, fault.reason, hint=fault.hint) from None


def _telling(folder: str, names: list[str]) -> str | None:
    """Return the name of the file that says what is in a folder; None if there is none."""
    indexes: list[str] = [name for name in names if name.endswith(INDEX)]
    for name in [*IN_FOLDERS, *(indexes if len(indexes) == 1 else [])]:
        if name in names:
            return name
    if indexes:
        hint = f"name one: {', '.join(indexes[:4])}"
        raise Unreadable(folder, "is a folder with several indexes", hint=hint)
    if any(name.endswith(METADATA) for name in names):
        what = "is a DCP checkpoint that each rank saved for itself (use_collectives=False), without a whole"
        hint = "load it on as many ranks, and save it with use_collectives=True, torch's default"
        raise Unsupported(folder, what, hint=hint)
    return None


@collector_paused()
def read(source: Source) -> Checkpoint:
    """Read a checkpoint from a file that is open already.

    Raises:
        Damaged, Unsupported: as `open` does.
    """
    head = head_of(source)
    if not head:
        hint = "it was never written, or a copy failed; copy it again"
        raise Unsupported(source.path, "is empty", hint=hint)
    for name in READERS:
        reader: Any = find(name)
        if reader and reader.sniff(head):
            checkpoint: Checkpoint = reader.read(source)
            return checkpoint
    raise stranger(source)


# A checkpoint that `open` returned, or the path of one.
File = Checkpoint | str | os.PathLike[str]


@contextmanager
def opened(file: File) -> Iterator[Checkpoint]:
    """Give a checkpoint; one that was opened from a path is closed at the end."""
    if isinstance(file, Checkpoint):
        yield file
        return
    if not isinstance(file, str | os.PathLike):
        raise TypeError(f"takes a path or an open checkpoint, not {type(file).__name__}")
    with open(file) as checkpoint:
        yield checkpoint
