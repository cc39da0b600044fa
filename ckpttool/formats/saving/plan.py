"""One output: what goes into it, how it is written, and what it must read back as."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property

from ...checkpoint.checkpoint import OF_TORCH, Checkpoint
from ...checkpoint.special_tensors import require_plain
from ...errors import Damaged, FileError, Refused
from ...files.commit import replacing
from ...files.copying import DryOutput, Output, Progress
from ...tensors.ref import Source, Storage, TensorRef
from .. import folders
from ..dcp import reading as dcp
from ..pytorch import zip as torch_zip
from ..reading import open as open_any
from ..reading import read
from ..safetensors import format as safetensors
from ..safetensors import in_place
from ..shards import writing as sharding
from .destination import WHOLE
from .folder_plan import FolderPlan, Written
from .report import PICKLES, Saved, saved_state, saved_whole

Check = Callable[[Checkpoint], None]


class SavePlan:
    """One output, planned but not yet written."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        path: str,
        kind: str,
        state: str | None,
        full: bool,
        keep_copies: bool,
        kept: Collection[str] = (),
    ) -> None:
        self.checkpoint, self.path, self.format = checkpoint, path, kind
        self.where, self.full, self.kept = state, full, kept
        checkpoint.require_whole()
        self.state = None if kind in WHOLE or full else checkpoint.state(state)
        if self.state is None and checkpoint.opened:
            raise Refused(
                checkpoint.path,
                f"{checkpoint.opened[0]} is a pickled object, and its keys can't be changed inside it",
                hint="write .safetensors, or extract the state first: ckpttool slim",
            )
        held = None if self.state is None else self.state.likes
        if kind == dcp.NAME and not full:
            held = dict(checkpoint.special_tensors())
        require_plain(checkpoint.path, held or {}, f"can't be held by {kind}", holds=False)
        self.ties: dict[str, str] = {}
        shares = kind == sharding.TORCH  # a pickle keeps ties by itself
        if self.state is not None and not (keep_copies or shares):
            self.ties = safetensors.ties(self.state.tensors, checkpoint.metadata)

    def tensors(self) -> Mapping[str, TensorRef]:
        """Return the tensors that the output will have, by their names in it."""
        return dict(self.checkpoint.tensors()) if self.state is None else self.state.tensors

    def storages(self) -> Iterable[tuple[str, Storage]]:
        """Return the storages that are written, by the names of what uses them; some repeatedly."""
        if self.state is None:
            return self.checkpoint.storages()
        return ((name, tensor.storage) for name, tensor in self.state.tensors.items())

    def work(self, verify: bool, dry_run: bool) -> int:
        """Return about the number of bytes that progress will come to."""
        if self.state is None or self.format in PICKLES:
            moved = sum({id(storage): storage.nbytes for _, storage in self.storages()}.values())
        else:
            moved = sum(tensor.nbytes for tensor in self._kept().values())
        compared = 2 * sum(tensor.nbytes for tensor in self.tensors().values()) if verify else 0
        return 0 if dry_run else moved + compared

    def write_folder(
        self, shard_size: int | None, dry_run: bool, opened: sharding.Opened, check: Check
    ) -> Saved:
        """Write a folder and put it in place; with `dry_run` only say what would be written."""
        size = shard_size or sharding.DEFAULT_SIZE
        plan = FolderPlan(self.checkpoint, self.format, self.state, self.full, self.ties, size, self.kept)
        if dry_run:
            return self._saved(plan.dry())

        def check_folder(folder: str) -> None:
            try:
                found = open_any(folder)
            except FileError as fault:
                reason = fault.message.replace(f"{folder}{os.sep}", "").replace(f"{folder}: ", "")
                raise Damaged(
                    self.path, f"does not read back as intended, and was not kept: {reason}"
                ) from None
            with found:
                check(found)

        return self._saved(plan.write(self.path, opened, check_folder))

    def dry_run(self) -> Saved:
        """Return what `write_file` would."""
        out = DryOutput()
        self._write(out)
        source = self.checkpoint.source
        nbytes = out.position if self._header_in_place is None else source.size
        return self._saved(Written(nbytes, 0))

    def write_file(self, opened: sharding.Opened, check: Check) -> Saved:
        """Write a file and put it in place."""
        with replacing(self.path) as file:
            with opened(file) as out:
                if self._header_in_place is None:
                    self._write(out)
                else:
                    in_place.write(self.checkpoint.source, self._header_in_place, out)
            check(read(Source(self.path, os.dup(file.fileno()))))
        return self._saved(Written(out.position, 0))

    def _write(self, out: Output) -> None:
        if self.format == torch_zip.NAME:
            torch_zip.write(self.checkpoint, out, self.path)
        elif self.state is None:
            safetensors.write_full(self.checkpoint, out)
        else:
            safetensors.write(self.checkpoint.path, self._kept(), self._metadata(), out)

    def _kept(self) -> dict[str, TensorRef]:
        """Return the tensors that get values of their own in a file of tensors."""
        assert self.state is not None
        return {name: tensor for name, tensor in self.state.tensors.items() if name not in self.ties}

    def _metadata(self) -> dict[str, str]:
        """Return the text of a safetensors header; none of ours if nothing is tied, as `save_file` has it."""
        own = dict(self.checkpoint.metadata)
        return OF_TORCH | own | self.ties if self.ties else own

    @cached_property
    def _header_in_place(self) -> bytes | None:
        """The header that takes the old one's place if the output is the input and its payload stays."""
        source = self.checkpoint.source
        if self.format != safetensors.NAME or self.state is None or not _is_same_file(source, self.path):
            return None
        kept = self._kept()
        start = in_place.payload_start(source, kept) if kept else None
        if start is None:
            return None
        ordered = sorted(kept.items(), key=in_place.by_place)
        header = safetensors.header(source.path, ordered, self._metadata(), fill=start)
        return header if len(header) == start else None

    def compare(self, found: Checkpoint, *, values: bool, progress: Progress | None) -> None:
        """Compare what was written with what was intended."""
        meant = self.tensors()
        there = dict(found.tensors()) if self.state is None else found.state("").tensors
        same = _structure(meant) == _structure(there)
        if same and values:
            from ...files.digest import digest  # whose hashlib loads OpenSSL

            same = digest(meant, progress) == digest(there, progress)
        if not same:
            raise Damaged(self.path, "does not read back as intended, and was not kept")

    def _saved(self, written: Written) -> Saved:
        report = (self.checkpoint, self.path, self.format, written.nbytes)
        if self.state is not None:
            saved = saved_state(*report, self.state, self.ties)
        else:
            state = self.checkpoint.state(self.where) if self.where else self.checkpoint.found_state()
            saved = saved_whole(*report, state, full=self.full)
        return replace(
            saved,
            shards=written.shards,
            not_copied=folders.not_copied(self.checkpoint, self.path, self.format),
            given_back=written.given_back,
            not_removed=written.not_removed,
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
