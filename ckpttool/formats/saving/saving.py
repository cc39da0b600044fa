"""Saving a checkpoint: in the format that the output's name says, complete or not at all."""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial

from ...checkpoint.checkpoint import OF_TORCH, Checkpoint, takes_checkpoint
from ...checkpoint.checksums import Checksums
from ...checkpoint.special_tensors import require_plain
from ...errors import Damaged, FileError, Refused
from ...files.commit import replacing, require_folder
from ...files.copying import DryOutput, Output, Progress
from ...tensors.ref import Source, Storage, TensorRef
from .. import folders
from ..dcp import reading as dcp
from ..pytorch import zip as torch_zip
from ..reading import open as open_any
from ..reading import read
from ..safetensors import format as safetensors
from ..shards import writing as sharding
from .destination import Destination, destination, require_device, require_place, require_sense
from .folder_plan import FolderPlan, Written
from .report import PICKLES, Saved, saved_state, saved_whole

Check = Callable[[Checkpoint], None]


class SavePlan:
    """One output, planned but not yet written."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Destination,
        state: str | None,
        keep_copies: bool,
        kept: Collection[str],
    ) -> None:
        kind, full = target.format, target.full
        self.checkpoint, self.path, self.format = checkpoint, target.path, kind
        self.where, self.full, self.kept = state, full, kept
        checkpoint.require_whole()
        self.state = None if target.holds_all else checkpoint.state(state)
        if self.state is None and checkpoint.opened:
            raise Refused(
                checkpoint.path,
                f"{checkpoint.opened[0]} is a pickled object, and its keys can't be changed inside it",
                hint="write .safetensors, or extract the state first: ckpttool slim",
            )
        special = None if self.state is None else self.state.likes
        if kind == dcp.NAME and not full:
            special = dict(checkpoint.special_tensors())
        require_plain(checkpoint.path, special or {}, f"can't be held by {kind}", holds=False)
        if self.state is None:
            for name, fault in checkpoint.index_faults():
                leave_out = f"leave it out: --exclude {shlex.quote(glob.escape(name))}"
                raise Damaged(checkpoint.path, f"'{name}' has {fault}: torch refuses it", hint=leave_out)
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
                written = open_any(folder)
            except FileError as fault:
                reason = fault.message.replace(f"{folder}{os.sep}", "").replace(f"{folder}: ", "")
                raise Damaged(
                    self.path, f"does not read back as intended, and was not kept: {reason}"
                ) from None
            with written:
                check(written)

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
                    safetensors.write_with_header(self.checkpoint.source, self._header_in_place, out)
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
        metadata = dict(self.checkpoint.metadata)
        return OF_TORCH | metadata | self.ties if self.ties else metadata

    @cached_property
    def _header_in_place(self) -> bytes | None:
        """The header that takes the old one's place if the output is the input and its payload stays."""
        source = self.checkpoint.source
        if self.format != safetensors.NAME or self.state is None or not _is_same_file(source, self.path):
            return None
        kept = self._kept()
        start = safetensors.payload_start(source, kept) if kept else None
        if start is None:
            return None
        ordered = sorted(kept.items(), key=safetensors.by_place)
        header = safetensors.header(source.path, ordered, self._metadata(), fill=start)
        return header if len(header) == start else None

    def compare(self, written: Checkpoint, *, values: bool, progress: Progress | None) -> None:
        """Compare what was written with what was intended."""
        meant = self.tensors()
        tensors = dict(written.tensors()) if self.state is None else written.state("").tensors
        same = _structure(meant) == _structure(tensors)
        if same and values:
            from ...files.digest import digest  # whose hashlib loads OpenSSL

            same = digest(meant, progress) == digest(tensors, progress)
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


@takes_checkpoint
def save(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    *,
    state: str | None = None,
    full: bool | None = None,
    keep_copies: bool = False,
    to: str | None = None,
    shard_size: int | None = None,
    verify: bool | None = None,
    force: bool = False,
    kept: Collection[str] = (),
    dry_run: bool = False,
    device: str | None = None,
    progress: Progress | None = None,
    expect: Progress | None = None,
) -> Saved:
    """Write a checkpoint.

    safetensors gets only the model's state, a `.pt` file everything. Bytes are moved from file to file, so
    memory stays flat. The input may be the output: its old contents are read until the new file replaces it.
    The output replaces nothing before it was read back and found to have the names, types and shapes
    intended.

    Args:
        checkpoint: what `ckpttool.open` or a transform returned.
        path: the output; `-` is standard output.
        state: dotted path of the model's state; None to find it.
        full: write everything the input holds, also into a format of tensors; None: only if the input is
            already such a file.
        keep_copies: write a tied tensor once per name, instead of recording the tie.
        to: the format; None: that of the folder which is there, or the one that the name's ending says.
        shard_size: the most bytes of a shard, in sharded formats; 5 GB when None.
        verify: None: compare what is read with the checksums that its file states, in the same pass, and read
            back the names, types and shapes that were written. True: read back the values too. False: do not
            compare checksums either.
        force: replace an existing output. Of a folder only the files of the checkpoint in it are replaced;
            if it holds others, it must be the one that the checkpoint was read from, where they stay.
        kept: names of other files that may be in a folder which is replaced, and stay in it.
        dry_run: write nothing: the same result, exact size included, and the same errors. Of DCP the size is
            that of the values alone, and an error of torch's own library is not foreseen.
        device: the device that a `.pt` tags its storages with, as `cpu`; None keeps those of the file.
        progress: called with the number of bytes after each piece; with `verify=True` those of the values
            that are read back count too.
        expect: called first, with about the number of bytes that progress will come to.

    Returns:
        What was written, and by name what was not.

    Raises:
        TypeError: `checkpoint` is something else, such as a path.
        OutputExists: there is something at `path`, and `force` is not given or can't help.
        UsageFault: the ending says no format, options contradict each other, or the place can't be written.
        Refused: the format can't hold something.
        NoState: a format of tensors was asked for and there is no state, or none at `state`.
        Damaged: what was read does not have its checksum (nothing was written), or what was written does not
            read back as intended (it was removed).
    """
    name = os.fspath(path)
    target = destination(name, checkpoint, to, full=full)
    kind = target.format
    require_sense(name, kind, state, full, keep_copies, shard_size)
    if device is not None:
        require_device(name, kind, device)
        checkpoint = replace(checkpoint, device=device)
    require_place(checkpoint, name, kind, force, kept)
    require_folder(name)
    plan = SavePlan(checkpoint, target, state, keep_copies, kept)
    if expect is not None:
        expect(plan.work(bool(verify), dry_run))
    return _written(plan, shard_size, verify, dry_run, progress)


def _written(
    plan: SavePlan, shard_size: int | None, verify: bool | None, dry_run: bool, progress: Progress | None
) -> Saved:
    """Write what is planned, and compare what was read and written before it takes its place."""
    opened = partial(Output, progress=progress)
    is_compared = not dry_run if verify is None else verify
    with Checksums(plan.checkpoint, plan.storages() if is_compared else ()) as checksums:
        if dry_run:
            checksums.finish()

        def check(found: Checkpoint) -> None:
            checksums.finish()
            plan.compare(found, values=bool(verify), progress=progress)

        if plan.format in folders.NAMES:
            return plan.write_folder(shard_size, dry_run, opened, check)
        return plan.dry_run() if dry_run else plan.write_file(opened, check)
