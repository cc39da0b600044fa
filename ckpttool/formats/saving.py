"""Writing a checkpoint: what goes into it, and the commit.

The file appears whole or not at all, and only after it was read back and found to have the names, types and
shapes that were meant.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import BinaryIO

from ..checkpoint.checkpoint import OF_TORCH, Checkpoint
from ..checkpoint.checksums import require_intact, with_checksum
from ..errors import Damaged, Refused
from ..files.commit import replacing, require_folder
from ..files.copying import DryOutput, Output, Progress
from ..files.fork import output
from ..tensors.ref import Source, Storage, TensorRef
from .destination import WHOLE, format_of_output, require_place, require_sense
from .folders import folders, sharding
from .pytorch import zip as torch_zip
from .reading import open as open_any
from .reading import read
from .safetensors import format as safetensors
from .safetensors import in_place
from .save_report import PICKLES, Saved, saved_state, saved_whole


def save(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    *,
    state: str | None = None,
    full: bool | None = None,
    keep_copies: bool = False,
    to: str | None = None,
    shard_size: int | None = None,
    verify: bool = False,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    expect: Progress | None = None,
    fork: bool = False,
) -> Saved:
    """Writes a checkpoint; the format follows the name.

    safetensors gets only the model's state, a `.pt` file everything. Bytes are moved from file to file, so
    memory stays flat. The input may be the output: its old contents are read until the new file replaces it.

    Args:
        state: dotted path of the model's state; found when None.
        full: everything the input holds, also into a format of tensors; None: if the input is already such a
            file.
        keep_copies: each name of a tied tensor gets its own values, instead of a record of the tie.
        to: the format; None: that of the folder which is there, or as the name says.
        shard_size: the most bytes of a shard, in sharded formats; 5 GB when None.
        verify: before, compare what is read with the checksums that its file states; and compare the values
            too before the output counts, not only names, types and shapes.
        force: replace an existing output. A folder is replaced as a whole, if it holds a checkpoint alone;
            the other files of one that is written in place stay.
        dry_run: write nothing: the same answer, exact size included, and the same errors. Of DCP the size is
            that of the values alone, and an error of torch's own library is not foreseen.
        progress: called with the number of bytes after each piece; to verify, what was read and what was
            written are read once more, and before that what has a checksum.
        expect: called first, with about the number of bytes that progress will come to.
        fork: let a second process help with values that are computed, such as those of another type, where
            that is worth it. For programs of one thread, on Linux; elsewhere it does nothing.

    Raises:
        OutputExists, UsageFault: nothing was written.
        Refused: something that the format can't hold.
        NoState: safetensors was asked for and there is no state.
        Damaged: what was read does not have its checksum, and nothing was written; or what was written does
            not read back as intended, and was removed.
    """
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(
            f"save takes a Checkpoint, as ckpttool.open gives it, not {type(checkpoint).__name__}"
        )
    name = os.fspath(path)
    kind = format_of_output(name, checkpoint, to)
    require_sense(name, kind, state, full, keep_copies, shard_size)
    require_place(checkpoint, name, kind, force)
    require_folder(name)
    whole = kind not in PICKLES and (checkpoint.full if full is None else full)
    writing = _Writing(checkpoint, name, kind, state, whole, keep_copies)
    if expect is not None:
        expect(writing.work(verify, dry_run))
    opened = partial(output, progress=progress, fork=fork)
    if verify:
        require_intact(checkpoint, writing.storages(), progress)
    if kind in folders.NAMES:
        return writing.saved(writing.folder(shard_size, verify, dry_run, progress, opened))
    return writing.saved(writing.dry() if dry_run else writing.file(verify, progress, opened))


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
                hint="write .safetensors, or extract the state first: ckpttool slim",
            )
        self.ties: dict[str, str] = {}
        shares = kind == sharding.TORCH  # a pickle keeps ties by itself
        if self.state is not None and not (keep_copies or shares):
            self.ties = safetensors.ties(self.state.tensors, checkpoint.metadata)

    def metadata(self) -> dict[str, str]:
        """The text of a safetensors header; none of ours where nothing is tied, as `save_file` has it."""
        own = dict(self.checkpoint.metadata)
        return OF_TORCH | own | self.ties if self.ties else own

    def tensors(self) -> Mapping[str, TensorRef]:
        """Those that the output will have, by their name in it."""
        return dict(self.checkpoint.tensors()) if self.state is None else self.state.tensors

    def storages(self) -> Iterable[tuple[str, Storage]]:
        """Those that are written, by the name of what uses them; some repeatedly."""
        if self.state is None:
            return self.checkpoint.storages()
        return ((name, tensor.storage) for name, tensor in self.state.tensors.items())

    def work(self, verify: bool, dry_run: bool) -> int:
        """About the number of bytes that progress comes to."""
        if self.state is None or self.format in PICKLES:
            moved = sum({id(storage): storage.nbytes for _, storage in self.storages()}.values())
        else:
            moved = sum(tensor.nbytes for tensor in self.kept().values())
        summed = sum(storage.nbytes for _, storage in with_checksum(self.storages())) if verify else 0
        compared = 2 * sum(tensor.nbytes for tensor in self.tensors().values()) if verify else 0
        return summed + (0 if dry_run else moved + compared)

    def folder(
        self,
        shard_size: int | None,
        verify: bool,
        dry_run: bool,
        progress: Progress | None,
        opened: sharding.Opened,
    ) -> int:
        """Writes a folder; returns its bytes."""
        size = shard_size or sharding.DEFAULT_SIZE
        folder = folders.FolderWriting(self.checkpoint, self.format, self.state, self.full, self.ties, size)
        if dry_run:
            return folder.dry()
        return folder.write(self.path, opened, partial(self.check_folder, values=verify, progress=progress))

    def dry(self) -> int:
        """The bytes that `file` would write, and the same errors."""
        out = DryOutput()
        self.write(out)
        return out.position if self.header_in_place() is None else self.checkpoint.nbytes

    def file(self, verify: bool, progress: Progress | None, opened: sharding.Opened) -> int:
        """Writes a file, or only its header where that is enough; returns its bytes."""
        header = self.header_in_place()
        if header is not None:
            self.compare(safetensors.described(self.checkpoint.source, header), verify, progress)
            if in_place.replace_header(self.checkpoint.source, header):
                return self.checkpoint.nbytes
        with replacing(self.path) as file:
            with opened(file, (storage for _, storage in self.checkpoint.storages())) as out:
                self.write(out)
            self.check(file, values=verify, progress=progress)
        if self.path != "-":
            in_place.forget(self.path)
        return out.position

    def write(self, out: Output) -> None:
        if self.format == torch_zip.NAME:
            torch_zip.write(self.checkpoint, out, self.path)
        elif self.state is None:
            safetensors.write_full(self.checkpoint, out)
        else:
            safetensors.write(self.checkpoint.path, self.kept(), self.metadata(), out)

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
        header = safetensors.header(source.path, ordered, self.metadata(), fill=start)
        return header if len(header) == start else None

    def check(self, file: BinaryIO, *, values: bool, progress: Progress | None) -> None:
        """Reads the file that was written, before it may replace anything."""
        self.compare(read(Source(self.path, os.dup(file.fileno()))), values, progress)

    def check_folder(self, folder: str, *, values: bool, progress: Progress | None) -> None:
        """The same of a folder."""
        self.compare(open_any(folder), values, progress)

    def compare(self, found: Checkpoint, values: bool, progress: Progress | None) -> None:
        meant = self.tensors()
        there = dict(found.tensors()) if self.state is None else found.state("").tensors
        same = _structure(meant) == _structure(there)
        if same and values:
            from ..files.digest import digest  # whose hashlib loads OpenSSL

            same = digest(meant, progress) == digest(there, progress)
        if not same:
            raise Damaged(self.path, "does not read back as intended, and was not kept")

    def saved(self, nbytes: int) -> Saved:
        saved = self._saved(nbytes)
        return replace(saved, not_copied=folders.not_copied(self.checkpoint, self.path, self.format))

    def _saved(self, nbytes: int) -> Saved:
        if self.state is not None:
            return saved_state(self.checkpoint, self.path, self.format, nbytes, self.state, self.ties)
        state = self.checkpoint.state(self.where) if self.checkpoint.states() else None
        return saved_whole(self.checkpoint, self.path, self.format, nbytes, state, full=self.full)


def _is_same_file(source: Source, path: str) -> bool:
    if path == "-":
        return False
    try:
        return os.path.samestat(os.fstat(source.fd), os.stat(path))
    except FileNotFoundError:
        return False


def _structure(tensors: Mapping[str, TensorRef]) -> dict[str, tuple[object, ...]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
