"""Writing a checkpoint: which format a name asks for, what goes into it, and the commit.

The file appears whole or not at all, and only after it was read back and found to have the names, types and
shapes that were meant.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from ..checkpoint import Checkpoint, State
from ..commit import replacing
from ..digest import digest
from ..errors import Damaged, OutputExists, Refused, UsageFault
from ..tensor import Source, TensorRef
from ..transfer import DryOutput, Output, Progress
from . import dcp, folders, in_place, safetensors, sharding, torch_zip
from .reading import open as open_any
from .reading import read

WHOLE = (torch_zip.NAME, dcp.NAME)
"""The formats that take everything a checkpoint holds, not the model's state alone."""

ENDINGS = {
    **dict.fromkeys(safetensors.EXTENSIONS, safetensors.NAME),
    **dict.fromkeys(torch_zip.EXTENSIONS, torch_zip.NAME),
}


@dataclass(frozen=True, slots=True)
class Saved:
    """What `save` wrote.

    Attributes:
        path: the output.
        format: its format.
        nbytes: its size.
        keys: how many names the model's state has in it.
        left_out: dotted names of what the format can't hold.
        tied: names kept as another name of a tensor, by a record in the metadata.
        copied: names that share memory and were written out each for itself.
    """

    path: str
    format: str
    nbytes: int
    keys: int
    left_out: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()


def format_of_output(path: str, checkpoint: Checkpoint, to: str | None) -> str:
    """The format that a name asks for. Raises UsageFault for a name that tells none."""
    if to is not None:
        known = (*dict.fromkeys(ENDINGS.values()), *folders.NAMES)
        if to not in known:
            raise UsageFault(f"--to {to}: no such format", hint=f"one of {', '.join(known)}")
        return to
    if path.endswith("/") or os.path.isdir(path):
        return folders.NAMES[0]
    suffix = os.path.splitext(path)[1].lower()
    if suffix in ENDINGS:
        return ENDINGS[suffix]
    if path == "-":
        return torch_zip.NAME if checkpoint.format.startswith("torch") else safetensors.NAME
    raise UsageFault(
        f"{path}: its ending does not tell the format",
        hint=f"end it in {', '.join(ENDINGS)}, or in / for a folder of shards",
    )


def save(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    *,
    state: str | None = None,
    full: bool = False,
    keep_copies: bool = False,
    to: str | None = None,
    shard_size: int | None = None,
    verify: bool = False,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Saved:
    """Writes a checkpoint; the format follows the name.

    safetensors gets the model's state alone, a `.pt` file everything. Bytes are moved from file to file, so
    memory stays flat. The input may be the output: its old contents are read until the new file replaces it.

    Args:
        state: dotted path of the model's state; found when None.
        full: everything the input holds, also into a format of tensors alone.
        keep_copies: each name of a tied tensor gets its own values, instead of a record of the tie.
        to: the format; told by the name when None.
        shard_size: bytes of a shard at most, in the formats that are cut; 5 GB when None.
        verify: compare the values too before the output counts, not only names, types and shapes.
        force: replace an existing output.
        dry_run: write nothing: the same answer, exact size included, and the same errors.
        progress: called with the number of bytes after each piece.

    Raises:
        OutputExists, UsageFault: nothing was written.
        Refused: something that the format can't hold.
        NoState: safetensors was asked for and there is no state.
        Damaged: what was written does not read back as it was meant; it was removed.
    """
    name = os.fspath(path)
    kind = format_of_output(name, checkpoint, to)
    if name != "-" and os.path.lexists(name) and not force:
        raise OutputExists(f"{name}: exists already", hint="write it anyway with --force")
    writing = _Writing(checkpoint, name, kind, state, full, keep_copies)
    if shard_size is not None and kind not in (sharding.SAFETENSORS, sharding.TORCH):
        raise UsageFault(
            "--shard-size: the output is one file", hint="end OUTPUT in / for a folder of shards"
        )
    if kind in folders.NAMES and name == "-":
        raise UsageFault(f"-: {kind} is a folder, and can't be streamed", hint="name a folder")
    if kind in folders.NAMES:
        folder = folders.FolderWriting(
            checkpoint, kind, writing.state, full, writing.ties, shard_size or sharding.DEFAULT_SIZE
        )
        return writing.saved(
            folder.dry()
            if dry_run
            else folder.write(name, progress, partial(writing.check_folder, values=verify))
        )
    header = writing.header_in_place()
    if dry_run:
        dry = DryOutput()
        writing.write(dry)
        return writing.saved(dry.position if header is None else checkpoint.nbytes)
    if header is not None:
        writing.compare(safetensors.described(checkpoint.source, header), values=verify)
        if in_place.replace_header(checkpoint.source, header):
            return writing.saved(checkpoint.nbytes)
    with replacing(name) as file:
        out = Output(file, progress) if progress else Output(file)
        writing.write(out)
        writing.check(file, values=verify)
    if name != "-":
        in_place.forget(name)
    return writing.saved(out.position)


class _Writing:
    """One output: what goes into it, and what it must read back as."""

    def __init__(
        self, checkpoint: Checkpoint, path: str, kind: str, state: str | None, full: bool, keep_copies: bool
    ) -> None:
        self.checkpoint, self.path, self.format = checkpoint, path, kind
        self.where, self.full = state, full
        self.state = None if kind in WHOLE or full else checkpoint.state(state)
        if self.state is None and checkpoint.opened:
            raise Refused(
                checkpoint.path,
                f"{checkpoint.opened[0]} is a pickled object, and its keys can't be changed inside it",
                hint="write .safetensors, or take the state out of it first: ckpttool slim",
            )
        self.ties: dict[str, str] = {}
        shares = kind == sharding.TORCH  # a pickle keeps ties by itself
        if self.state is not None and not (keep_copies or shares):
            self.ties = safetensors.ties(self.state.tensors, checkpoint.metadata)

    def write(self, out: Output) -> None:
        path, metadata = self.checkpoint.path, self.checkpoint.metadata
        if self.format == torch_zip.NAME:
            torch_zip.write(self.checkpoint, out, self.path)
        elif self.state is None:
            safetensors.write_full(self.checkpoint, out)
        else:
            safetensors.write(path, self.kept(), {**metadata, **self.ties}, out)

    def kept(self) -> dict[str, TensorRef]:
        """The tensors that get values of their own in a file of tensors."""
        assert self.state is not None
        return {name: tensor for name, tensor in self.state.tensors.items() if name not in self.ties}

    def header_in_place(self) -> bytes | None:
        """The header to write over the old one, where the output is the input and its payload may stay."""
        source = self.checkpoint.source
        if self.format != safetensors.NAME or self.state is None or not _is_same_file(source, self.path):
            return None
        kept = self.kept()
        start = in_place.payload_start(source, kept) if kept else None
        if start is None:
            return None
        ordered = sorted(kept.items(), key=in_place.by_place)
        metadata = {**self.checkpoint.metadata, **self.ties}
        header = safetensors.header(source.path, ordered, metadata, fill=start)
        return header if len(header) == start else None

    def check(self, file: BinaryIO, *, values: bool) -> None:
        """Reads the file that was written, before it may replace anything."""
        self.compare(read(Source(self.path, os.dup(file.fileno()))), values)

    def check_folder(self, folder: str, *, values: bool) -> None:
        """The same of a folder."""
        self.compare(open_any(folder), values)

    def compare(self, found: Checkpoint, values: bool) -> None:
        if self.state is None:
            meant, there = dict(self.checkpoint.tensors()), dict(found.tensors())
        else:
            meant, there = self.state.tensors, found.state("").tensors
        same = _structure(meant) == _structure(there)
        if not same or (values and digest(meant) != digest(there)):
            raise Damaged(self.path, "does not read back as it was meant, and was not kept")

    def saved(self, nbytes: int) -> Saved:
        if self.state is None:
            state = self.checkpoint.state(self.where) if self.checkpoint.states() else None
            keys = len(state.tensors) if state else 0
            lost = self.checkpoint.unread
            if self.format in WHOLE:  # which have no place for the text of a safetensors header
                lost += tuple(f"metadata '{name}'" for name in self.checkpoint.metadata)
            if self.format != dcp.NAME or self.full:
                return Saved(self.path, self.format, nbytes, keys, lost)
            lost = (*folders.lost_in_dcp(self.checkpoint), *lost)
            return Saved(self.path, self.format, nbytes, keys, lost, copied=_copied(state) if state else ())
        left_out = _left_out(self.checkpoint, self.state) + self.checkpoint.unread
        apart = () if self.format == sharding.TORCH else _copied(self.state)
        copied = tuple(name for name in apart if name not in self.ties)
        return Saved(
            self.path, self.format, nbytes, len(self.state.tensors), left_out, tuple(self.ties), copied
        )


def _is_same_file(source: Source, path: str) -> bool:
    if path == "-":
        return False
    try:
        return os.path.samestat(os.fstat(source.fd), os.stat(path))
    except FileNotFoundError:
        return False


def _structure(tensors: Mapping[str, TensorRef]) -> dict[str, tuple[object, ...]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def _left_out(checkpoint: Checkpoint, state: State) -> tuple[str, ...]:
    """What a file of the state's tensors alone leaves behind, by the shortest names that say it."""
    inside = [*state.others, *(["_metadata"] if state.versions is not None else [])]
    where = f"{state.where}." if state.path else ""
    return (*(where + name for name in inside), *checkpoint.outside(state))


def _copied(state: State) -> tuple[str, ...]:
    """Names whose bytes stand under another name too: each name gets a copy in a format without sharing."""
    storages: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in state.tensors.items():
        storages.setdefault(id(tensor.storage), []).append((*tensor.span, name))
    copied = set()
    for spans in storages.values():
        reached = 0
        for begin, end, name in sorted(spans, key=lambda span: span[0]):
            if begin < min(end, reached):
                copied.add(name)
            reached = max(reached, end)
    return tuple(name for name in state.tensors if name in copied)
