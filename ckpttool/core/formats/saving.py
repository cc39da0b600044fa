"""Saving a checkpoint: `save`, and the plan of one output that it carries out."""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, BinaryIO

from ... import __version__
from ...errors import Damaged, Refused, Unsupported, UsageFault
from ...rooms import need
from .. import system
from ..checkpoint import full
from ..checkpoint.checkpoint import OF_TORCH, Checkpoint, require_checkpoint
from ..checkpoint.checksums import Checksums, each_once, reads_of, require_made
from ..checkpoint.module_tree import declares_packing
from ..checkpoint.special_tensors import require_plain
from ..files.copying import DryOutput, Output, Planned
from ..files.parts import OutputPart, OutputParts
from ..files.resuming import Attempt
from ..files.threads import Progress
from ..inert_pickle.values import OrderedDict_
from ..lazy import needing_torch, np
from ..remote import urls
from ..remote.places import shared_versions, versions
from ..remote.store import TRAFFIC
from ..tensors.ref import DTYPES, Computed, Source, Storage, TensorRef
from . import destination, folders, safetensors, shards
from .output import OutputPlace
from .pytorch import zip as torch_zip
from .reading import open as open_any
from .reading import read

Tensors = safetensors.Tensors
Check = Callable[[Checkpoint], None]


class SavePlan:
    """One output, planned but not yet written."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: destination.Destination,
        place: OutputPlace,
        where: str | None,
        shard_size: int | None,
        options: destination.SaveOptions,
    ) -> None:
        if target.format == folders.DCP and not target.full:
            checkpoint = need("dcp.reading").with_each_its_own(checkpoint)
        self.checkpoint, self.place, self.where, self.options = checkpoint, place, where, options
        self.shard_size = shard_size or shards.DEFAULT_SIZE
        self.target, self.path, self.format, self.full = target, target.path, target.format, target.full
        checkpoint.require_whole()
        self.state = None if target.holds_all else checkpoint.state(where)
        if self.state is None and checkpoint.opened:
            what = f"{checkpoint.opened[0]} is a pickled object, and its keys can't be changed inside it"
            alone = f"ckpttool slim {shlex.quote(checkpoint.path)} state.pt"
            hint = f"write .safetensors, or extract the state first: {alone}"
            raise Refused(checkpoint.path, what, hint=hint)
        if not target.has_metadata and (said := declares_packing(checkpoint.metadata)):
            what = f"says in its header how tensors are packed ({said}), which {self.format} can't hold"
            plain = f"ckpttool convert {shlex.quote(checkpoint.path)} plain.safetensors --dequantize"
            raise Refused(checkpoint.path, what, hint=f"write safetensors, or make it plain: {plain}")
        for name, tensor in () if target.has_metadata else self.tensors().items():
            if tensor.dtype.name not in DTYPES:
                what = f"'{name[:200]}' has the type {tensor.dtype.safetensors}, unknown to torch"
                raise Unsupported(checkpoint.path, what, hint="write safetensors")
        special = {} if self.state is None else self.state.likes
        if self.format == folders.DCP and not self.full:
            special = dict(checkpoint.special_tensors())
        require_plain(checkpoint.path, special, f"can't be held by {self.format}", holds=False)
        for name, fault in checkpoint.index_faults() if self.state is None else ():
            leave_out = f"leave it out: --exclude {shlex.quote(glob.escape(name))}"
            raise Damaged(checkpoint.path, f"'{name}' has {fault}: torch refuses it", hint=leave_out)
        self.ties: dict[str, str] = {}
        if options.like is not None:
            self.ties = {**options.like.ties}
        elif self.state is not None and not options.keep_copies and self.format not in destination.PICKLES:
            self.ties = safetensors.ties(self.state.tensors, checkpoint.metadata)
        self.reflink, self._outputs = place.sharing(options.reflink, lambda: self.sources), list[Output]()

    def tensors(self) -> Tensors:
        """Return the tensors that the output will have, by their names in it."""
        return dict(self.checkpoint.tensors()) if self.state is None else self.state.tensors

    @cached_property
    def storages(self) -> list[tuple[str, Storage]]:
        """The storages that are written, by the names of what uses them; some repeatedly."""
        if self.state is None:
            return [*self.checkpoint.storages()]
        return [(name, tensor.storage) for name, tensor in self.state.tensors.items()]

    @cached_property
    def used(self) -> list[tuple[str, Storage]]:
        """The storages that are written, and those that they come from, once each."""
        return [*each_once(self.storages)]

    @cached_property
    def sources(self) -> set[Source]:
        """The files that are read."""
        return {place.source for place in reads_of(self.used)}

    def work(self, verify: bool) -> int:
        """Return about the number of bytes that progress will come to."""
        if self.state is None or self.format in destination.PICKLES:
            moved = sum({id(storage): storage.nbytes for _, storage in self.storages}.values())
        else:
            moved = sum(tensor.nbytes for tensor in self._flat[0].values())
        return moved + (2 * sum(tensor.nbytes for tensor in self.tensors().values()) if verify else 0)

    def carried_out(self, verify: bool | None, dry_run: bool) -> destination.Saved:
        """Write, and compare what was read and written before it takes its place."""
        require_made(self.used)
        is_compared = not dry_run if verify is None else verify
        if isinstance(part := self.options.part, OutputPart):
            self._require_divisible()
            if not dry_run:
                return self._in_parts(part, is_compared, values=bool(verify))
        is_announced = self.format in (shards.SAFETENSORS, shards.TORCH)  # as they are written
        if not (dry_run or is_announced or all(source.is_local for source in self.sources)):
            urls.expect((storage for _, storage in self.storages), as_they_lie=True)
        with Checksums(self.checkpoint, self.used if is_compared else ()) as checksums:
            if dry_run:
                checksums.finish()
                return self.dry_run()
            attempt = self._attempt(checksums)
            if attempt:
                checksums.take(attempt.seen)
                attempt.watch(checksums.seen)
            return self._written(checksums, attempt, values=bool(verify))

    def _written(self, checksums: Checksums, attempt: Attempt | None, *, values: bool) -> destination.Saved:
        """Write the output, and compare all before it takes its place."""

        before = {source: source.version for source in self.sources if source.is_local}

        def check(written: Checkpoint) -> None:
            checksums.finish()
            # What is shared is what was there at one moment, and its checksum that of another.
            changed = [source.path for source, version in before.items() if source.version != version]
            if changed and any(output.shared for output in self._outputs):
                raise Damaged(changed[0], "changed while it was read", hint="run the command again")
            self.compare(written, values=values, progress=self.options.progress)

        def opened(file: BinaryIO) -> Output:
            return self._opened(file, attempt, checksums)

        return self.write(opened, check, attempt)

    def _opened(self, file: BinaryIO, attempt: Attempt | None, checksums: Checksums) -> Output:
        written = attempt.written(file) if attempt else None
        announce = urls.expect_ranges if isinstance(attempt, OutputParts) else None
        progress, in_a_row = self.options.progress, checksums.in_a_row
        self._outputs.append(Output(file, progress, written, in_a_row, announce, self.reflink))
        return self._outputs[-1]

    def _planned(self, checksums: Checksums, opened: object) -> tuple[str, dict[str, int]]:
        """Return the hash of all that makes the output, and the sizes of its files by name."""
        # What was read without comparing it can't be compared later: reading it again would be another read.
        reading = checksums.compares, checksums.in_a_row
        plan, sizes = Planned((self.options.recipe, opened, *reading), self.reflink), dict[str, int]()
        if self.format not in folders.NAMES:
            self._write(plan)
            return plan.hash.hexdigest(), {"": plan.position}
        cut, index = self._shards()
        for name, tensors in cut.items():
            plan.position = 0
            self._write_shard(name, tensors, plan)
            sizes[name] = plan.position
        plan.write(index.encode())
        return plan.hash.hexdigest(), sizes

    def _attempt(self, checksums: Checksums) -> Attempt | None:
        """Return what keeps an interrupted output of remote files; None for any other."""
        sources, resume = self.sources, self.options.resume
        if self.place.is_uploaded or self.path == "-" or self.format == folders.DCP:
            return None  # what is uploaded is kept nowhere
        if all(source.is_local for source in sources) or not all(source.version[1] for source in sources):
            return None  # who could tell whether it has changed since?
        plan, _ = self._planned(checksums, sorted({*versions(), *(repr(each.version) for each in sources)}))
        computed = bool(self.options.recipe)
        attempt = Attempt(system.real(self.path), plan, resume=resume, computed=computed)
        if resume:
            begun = "begun from the start, as no earlier attempt of the same plan is here"
            TRAFFIC.remark(f"{self.path}: {'gone on with' if attempt.is_resumed else begun}")
        return attempt

    def _in_parts(self, part: OutputPart, is_compared: bool, *, values: bool) -> destination.Saved:
        """Write a part; put all in place if it is the last."""
        with Checksums(self.checkpoint, self.used if is_compared else ()) as checksums:
            # Rules and settings make the output too, though no byte is copied from them.
            opened = shared_versions() | {source.path: source.shared_version for source in self.sources}
            plan, sizes = self._planned(checksums, sorted(opened.values(), key=repr))
            facts: dict[str, object] = {"version of ckpttool": __version__, "command": self.options.recipe}
            facts |= {f"input {path}": repr(version) for path, version in sorted(opened.items())}
            told = {"progress": self.options.progress, "expect": self.options.expect}
            parts = self.place.parts(part, {**facts, "plan": plan}, sizes, self.options.words, **told)
            parts.require_place(force=self.place.force)
            checksums.take(parts.seen)
            if not parts.is_written:
                parts.watch(checksums.seen)
                with parts.unless_finished():
                    self._write_part(parts, checksums)
                    part.wait()
                    parts.note(done=True)
            if parts.is_finished:
                return self._saved(parts.nbytes, part=str(part))
            waiting = parts.waiting()
            if waiting and not part.number:
                raise parts.lacking(self.place.url or self.path, waiting)
            with parts.finishing() if not waiting else nullcontext(False) as is_mine:
                if not is_mine:
                    numbers = tuple(each.number for each in waiting)
                    return self._saved(parts.nbytes, part=str(parts.part), waiting=numbers)
                for seen in parts.sums:
                    checksums.take(seen)
                saved = self._written(checksums, parts, values=values and not self.place.url)
                is_mine = parts.put_in_place(self.path)
                return saved if is_mine else self._saved(parts.nbytes, part=str(parts.part))

    def _require_divisible(self) -> None:
        """Refuse what parts on several machines can't read or write alike."""
        reason = ""
        if self.format == folders.DCP:
            reason = "is written by torch's library, as a whole"
        elif any(source.path == "-" for source in self.sources):
            reason = "would be made of stdin, which only one part can read"
        elif not all(source.version[1] for source in self.sources):
            reason = "would be made of objects without a version, which may change between two parts"
        if reason:
            where = self.place.url or self.path
            raise UsageFault(f"{where}: {reason}", hint="leave out --part, --jobs, torchrun")

    def _write_part(self, parts: OutputParts, checksums: Checksums) -> None:
        def opened(file: BinaryIO) -> Output:
            return self._opened(file, parts, checksums)

        if self.format in folders.NAMES:
            shards.write_files(parts.place, self._shards()[0], self._write_shard, opened)
            return
        with open(parts.place, "r+b") as file, opened(file) as out:
            self._write(out)

    def dry_run(self) -> destination.Saved:
        """Return what `write` would, of DCP the bytes of the values alone, and raise what it would."""
        if self.format == folders.DCP:
            tree = self._for_dcp()
            need("dcp.reading").check(tree)
            return self._saved(sum(tensor.nbytes for _, tensor in tree.tensors()))
        if self.format not in folders.NAMES:
            return self._saved(self._dry(self._write))
        cut, index = self._shards()
        sizes = [self._dry(partial(self._write_shard, name, tensors)) for name, tensors in cut.items()]
        return self._saved(sum(sizes) + len(index.encode()), shards=len(cut))

    def _dry(self, write: Callable[[Output], None]) -> int:
        """Return how many bytes would be written."""
        out = DryOutput(self.reflink)
        write(out)
        return out.position

    def write(self, opened: shards.Opened, check: Check, attempt: Attempt | None = None) -> destination.Saved:
        """Write the output and put it in place."""
        if self.format in folders.NAMES:
            return self._write_folder(opened, check, attempt)
        with self.place.file(attempt, self.options.time) as file:
            with opened(file) as out:
                self._write(out)
            check(read(Source(self.path, os.dup(file.fileno()))))
        return self._saved(out.position)

    def _write_folder(
        self, opened: shards.Opened, check: Check, attempt: Attempt | None
    ) -> destination.Saved:
        kept = self.options.kept
        stay = [name for name in kept if os.path.lexists(os.path.join(self.path, name))]
        stay += folders.companions(self.checkpoint, self.path)
        replaced = folders.replaced_by(self.checkpoint, self.path)
        with self.place.folder(replaced, {*stay}, attempt) as new:
            if self.format == folders.DCP:
                with needing_torch("writing a DCP folder"):
                    write = need("dcp.writing").write
                write(self._for_dcp(), new.path)
            else:
                index = self.options.like.index_name if self.options.like else ""
                shards.write(new.path, self.format, *self._shards(), self._write_shard, opened, index)
            with destination.read_back(self.path, new.path):
                written = open_any(new.path)
            with written:
                check(written)
            sizes = {entry.name: entry.stat().st_size for entry in os.scandir(new.path)}
        return self._saved(
            sum(sizes.values()),
            shards=sum(not name.endswith((folders.METADATA, shards.INDEX)) for name in sizes),
            given_back=tuple(new.given_back),
            not_removed=tuple(new.not_removed),
        )

    @cached_property
    def _flat(self) -> tuple[Tensors, dict[str, str]]:
        """The tensors that a format of tensors gets values of, and the text of the rest if all is kept."""
        if self.state is None:
            read = self.checkpoint
            flat = full.encode_entry(read.path, read.tree, read.protocol)
            return flat.tensors, {full.ENTRY: flat.text}
        return {name: ref for name, ref in self.state.tensors.items() if name not in self.ties}, {}

    def _write(self, out: Output) -> None:
        if self._header_in_place is not None:
            safetensors.write_with_header(self.checkpoint.source, self._header_in_place, out)
        elif self.format == torch_zip.NAME:
            torch_zip.write(self.checkpoint, out, self.path)
        else:
            self._write_tensors(self.path, self._flat[0], self._metadata(), out)

    def _metadata(self) -> dict[str, str]:
        """Return the text of a safetensors header; none of ours if nothing is tied, as `save_file` has it."""
        metadata = {**self.checkpoint.metadata, **self._flat[1]}
        return OF_TORCH | metadata | self.ties if self.ties else metadata

    def _shards(self) -> tuple[shards.Cut, str]:
        """Return the shards, and the text of their index."""
        tensors, texts = self._flat
        if self.options.like is not None:
            cut = self.options.like.cut(tensors)
            return cut, self.options.like.index_text(cut)
        cut = shards.cut_by_size(self.format, tensors, self.shard_size)
        return cut, shards.index_text(cut, {**texts, **({shards.TIES: self.ties} if self.ties else {})})

    def _write_shard(self, name: str, tensors: Tensors, out: Output) -> None:
        if self.format == shards.SAFETENSORS:
            self._write_tensors(name, tensors, OF_TORCH | {**self.checkpoint.metadata}, out)
        else:
            torch_zip.write(replace(self.checkpoint, tree=OrderedDict_(tensors)), out, name)

    def _write_tensors(self, name: str, tensors: Tensors, metadata: Mapping[str, str], out: Output) -> None:
        """Write a file of safetensors, in the library's order or in that of another model."""
        path, head = self.checkpoint.path, None
        if (like := self.options.like) is not None:
            tensors = tensors if like.index_name else next(iter(like.cut(tensors).values()))
            head = like.head(path, name, tensors)
        safetensors.write(path, tensors, metadata, out, head)

    def _for_dcp(self) -> Checkpoint:
        """Return what DCP can hold of the checkpoint; with `full`, the rest of it is one entry of text."""
        if not self.full:
            models_apart: Checkpoint = need("dcp.reading").without_models(self.checkpoint)
            return models_apart
        tensors, texts = self._flat
        return replace(self.checkpoint, tree={**tensors, **texts})

    @cached_property
    def _header_in_place(self) -> bytes | None:
        """The header that takes the old one's place if the output is the input and its payload stays."""
        source = self.checkpoint.source
        is_state = self.format == safetensors.NAME and self.state is not None
        if not is_state or not folders.is_same_file(source, self.path):
            return None
        return safetensors.header_in_place(source, self._flat[0], self._metadata())

    def compare(self, written: Checkpoint, *, values: bool, progress: Progress | None) -> None:
        """Compare what was written with what was intended."""
        tensors = dict(written.tensors()) if self.state is None else written.state("").tensors
        destination.require_same(self.path, tensors, self.tensors(), values=values, progress=progress)

    def _saved(self, nbytes: int, **facts: Any) -> destination.Saved:
        state = self.state
        if state is None:
            state = self.checkpoint.state(self.where) if self.where else self.checkpoint.found_state()
        facts |= destination.report(self.checkpoint, self.target, state, self.ties)
        facts["shared"] = sum(output.shared for output in self._outputs)
        facts["not_copied"] = folders.not_copied(self.checkpoint, self.path, self.format)
        return destination.Saved(self.path, self.format, nbytes, **facts)


# ---- Saving: complete or not at all.


def _in_memory(tensors: Mapping[str, Any]) -> Checkpoint:
    """Return tensors of torch or arrays of NumPy as a checkpoint; their bytes stay where they are."""
    tensors = dict(tensors.items())  # kept, if the mapping makes each anew: another could take its place
    source = Source("the tensors", os.open(os.devnull, os.O_RDONLY))
    known: dict[object, TensorRef] = {}
    tree = OrderedDict_()
    for name, value in tensors.items():
        if isinstance(value, TensorRef):
            tree[name] = value
            continue
        of_torch = hasattr(value, "data_ptr") and hasattr(value, "layout")
        kind = getattr(value, "dtype", None)  # NumPy's has a name without its byte order
        dtype = DTYPES.get(str(getattr(kind, "name", kind)).removeprefix("torch."))
        is_plain = not of_torch or (str(value.layout) == "torch.strided" and value.device.type != "meta")
        if not isinstance(name, str):
            raise TypeError(f"save() takes a dict of tensors by name; {name!r} is no str")
        if dtype is None or not is_plain:
            what = f"save() takes a dict of tensors by name; {name!r} is {type(value).__name__}"
            raise TypeError(f"{what}, and no plain tensor of torch or array of NumPy")
        key = _memory(value) if of_torch else id(value)
        if key not in known or not value.nbytes:
            data = Computed.in_memory(source.path, _bytes_of(value, of_torch=of_torch))
            known[key] = TensorRef.of_bytes(data, dtype, tuple(value.shape))
        tree[name] = known[key]
    return Checkpoint(source, torch_zip.NAME, tree)


def _memory(value: Any) -> object:
    """Return a key that tensors of torch share exactly when they are the same values in the same memory."""
    layout = (*value.shape, *value.stride(), value.is_conj(), value.is_neg())
    return str(value.device), value.data_ptr(), value.dtype, layout


def _bytes_of(value: Any, *, of_torch: bool) -> Any:
    if not of_torch:
        return np.ascontiguousarray(value, value.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
    import torch

    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy()


def save(
    checkpoint: Checkpoint | Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    state: str | None = None,
    full: bool | None = None,
    to: str | None = None,
    shard_size: int | None = None,
    verify: bool | None = None,
    force: bool = False,
    dry_run: bool = False,
    **more: Any,
) -> destination.Saved:
    """Write a checkpoint.

    safetensors gets only the model's state, a `.pt` file everything. Memory stays flat. The input may be the
    output. The output replaces nothing before it was read back: names, types and shapes as intended.

    Args:
        checkpoint: what is written: a checkpoint, or a dict of tensors of torch or arrays of NumPy by name.
        path: the output; `-` is standard output. What is named by a URL (s3, gs, az, hf) is written to a
            temporary file, and then uploaded.
        state: dotted path of the model's state; None to find it.
        full: write everything, also into a format of tensors; None: only if the input is already such a file.
        to: the format; None: that of the folder which is there, or the one that the name's ending says.
        shard_size: the most bytes of a shard, in sharded formats; 5 GB when None.
        verify: None compares what is read with the checksums that its file states. True: also reads back the
            values that were written. False: does not compare checksums either.
        force: replace an existing output. Of a folder only the files of the checkpoint in it are replaced;
            if it holds others, it must be the one that the checkpoint was read from, where they stay. A part
            of an input is never replaced, nor the base of a delta that is one.
        dry_run: write nothing: the same result, exact size included, and the same errors. Of DCP the size is
            that of the values alone, and an error of torch's own library is not foreseen.
        more: any of the following.
        keep_copies: write a tied tensor once per name, instead of recording the tie.
        kept: names of other files that may be in a folder which is replaced, and stay in it.
        needed: further inputs, paths or open checkpoints, that are needed beside the output: no file of them
            is replaced, with `force` either.
        device: the device that a `.pt` tags its storages with, as `cpu`; None keeps those of the file.
        progress: called with the number of bytes after each piece, also of values that are read back.
        expect: called first, with about the number of bytes that progress will come to; again before an
            upload, with those that are sent.
        part: write only this part of the output; whoever writes the last one puts all in place. `recipe` has
            to tell computed values from those of another call.
        resume: go on with an output of remote files whose writing was interrupted, if it is of the same plan:
            the same versions of the same objects, and the same call.
        reflink: `auto`, `always` or `never` share blocks with the inputs, where the file system can. `always`
            orders tensors for it, instead of as the library does, and writes nothing where it fails.
        recipe: what tells computed values (a cast, a mean) from those of another call. Without it, and where
            files state checksums, only bytes that are copied are not fetched again.
        like: a `likeness.Likeness`: the files, order and headers of another model's.
        time: when the output was changed, in nanoseconds, where it is a file; None for now.

    Returns:
        What was written, and by name what was not.

    Raises:
        TypeError: `checkpoint` is something else, such as a path; or there is no such option.
        OutputExists: there is something at `path`, and `force` is not given or can't help.
        UsageFault: the ending says no format, options contradict each other, or the place can't be written.
        Refused, NoState: the format can't hold something, or blocks should always be shared and can't be;
            there is no state, or none at `state`.
        Damaged: what was read does not have its checksum (nothing was written), or what was written does not
            read back as intended (it was removed).

    Example:
        >>> with ckpttool.open("last.pt") as checkpoint:
        ...     plain, renaming = ckpttool.strip_prefix(checkpoint)
        ...     saved = ckpttool.save(plain, "plain.safetensors")
        >>> saved.keys, saved.left_out
        (7, ('optimizer', 'epoch'))
        >>> import numpy
        >>> ckpttool.save({"w": numpy.ones((2, 3), "float32")}, "of-arrays.safetensors").keys
        1
    """
    if isinstance(checkpoint, Mapping):
        checkpoint = _in_memory(checkpoint)
    require_checkpoint("save", checkpoint)
    options = destination.SaveOptions(**more)
    if isinstance(options.part, str):
        options = replace(options, part=OutputPart.parse(options.part))
    named = OutputPlace.at(path, force, options.needed, checkpoint)
    if options.part:
        named.require_meeting()
    is_part = bool(options.part) and not dry_run
    with named.local(dry_run, options.progress, options.expect, is_part=is_part) as place:
        target = destination.destination(place.path, checkpoint, to, full=full)
        destination.require_sense(target, state, full, shard_size, options)
        if options.device is not None:
            checkpoint = replace(checkpoint, device=options.device)

        def stay() -> list[str]:
            return [*options.kept, *folders.companions(checkpoint, place.path)]

        replaced = folders.replaced_by(checkpoint, place.path) if target.is_folder else None
        place.require(replaced, stay, target.format, may_be_empty=not target.is_named_as_file)
        plan = SavePlan(checkpoint, target, place, state, shard_size, options)
        if options.expect is not None:
            count = getattr(options.part, "count", 1) or 1
            options.expect(0 if dry_run else plan.work(bool(verify)) // count)
        saved = plan.carried_out(verify, dry_run)
    return replace(saved, path=named.path)
