"""A delta written: what changed between two checkpoints, as a file of tensors."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ..core.checkpoint import full
from ..core.checkpoint.checkpoint import OF_TORCH, Checkpoint
from ..core.checkpoint.checksums import Checksums, unmatched, with_parts
from ..core.checkpoint.state import elsewhere
from ..core.files.digest import digest, digest_of, tensor_digests
from ..core.files.threads import Progress
from ..core.formats import safetensors
from ..core.formats.destination import Saved, format_of_name
from ..core.formats.output import OutputPlace
from ..core.formats.reading import File, open_alone, opened
from ..core.formats.saving import save
from ..core.formats.strangers import unwritable
from ..core.inert_pickle.values import OrderedDict_
from ..core.remote.urls import is_url, without_query
from ..core.tensors.ref import Source, TensorRef
from ..errors import Refused, UsageFault
from . import differences, publishing
from .encoding import INT32, DeltaPair, Encoded, Encoder
from .forms import FORMS, WRITTEN
from .header import ENTRY, NEW, SAME, SPARSE, TREE, XOR, Base, Header, digest_of_tree
from .publishing import Publication
from .reading import NAME, DeltaLink, base_tensors, joined

VLLM = "vllm"
FALSE = "does not make the newer checkpoint: report this, with both files"


@dataclass(frozen=True, slots=True)
class Delta:
    """What `delta` wrote.

    Attributes:
        saved: the file.
        kinds: how many tensors are kept in each way: `same`, `sparse`, `xor`, `new`.
        of: the size of the newer checkpoint's files.
        new_digest: digest of the newer one's state, as `ckpttool digest` prints it; None where it holds none,
            or it can't be said which.
        without_zstd: no XOR was tried, as nothing here knows zstd.
    """

    saved: Saved = field(metadata={"json": None})
    kinds: Mapping[str, int]
    of: int
    new_digest: str | None
    without_zstd: bool = False


@dataclass(slots=True)
class _Job:
    base: Checkpoint
    new: Checkpoint
    path: str
    progress: Progress
    base_name: str | None
    compares: bool  # checksums of what is read


def delta(
    base: File,
    new: File,
    path: str | os.PathLike[str],
    *,
    layout: str | None = None,
    encoding: str | None = None,
    checksum: str | None = None,
    state: str | None = None,
    base_name: str | None = None,
    verify: bool | None = None,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    expect: Progress | None = None,
) -> Delta:
    """Write the difference between two checkpoints, from which `apply` rebuilds the newer one.

    It is lossless to the last bit: values of every type, names, order, ties, shapes, and everything else
    that `--full` keeps. Each tensor takes the smallest of: nothing, if it is the base's; the places and
    values that differ; the XOR with the base's in byte planes, packed by zstd; itself. docs/deltas.md defines
    the file.

    Args:
        base: the older checkpoint: a path, or an open one.
        new: the newer one.
        path: the delta, a file of safetensors; `-` is standard output.
        layout: None; or the form of another program, which holds nothing but changed values of the same
            tensors: `weight-v` and `skyrl`, folders whose names end with the version; `vllm`, a file.
        encoding, checksum: for `weight-v` and `skyrl`, others than their usual ones: `overwrite`; `blake3`,
            `adler32`, `sha256`.
        state: for a layout, the dotted path of the model's state in both; found when None.
        base_name: the name under which the base will lie beside the delta; its own when None.
        verify: True: apply what was written to the base, and compare the digest. False: do not compare the
            checksums of what is read either.
        force: replace an existing file, which may be the newer one, and never a file of the base.
        dry_run: write nothing; the same result.
        progress: called with the number of bytes of the newer one after each piece.
        expect: called first, with about the number of bytes that progress will come to.

    Returns:
        What was written, and how many tensors in which form.

    Raises:
        UsageFault: there is a file already, or the base is it (OutputExists); the place can't be written, or
            its name ends as that of another format.
        Refused: the newer one holds what its tree does not, such as code; a file was changed while it was
            read; or `vllm` can't hold a change.
        Unreadable, Damaged, Unsupported: as for reading the two.
        NoState: one's tensors lie beside it, by the trainer's --shard parts; or for `vllm`, it holds none.

    Example:
        >>> made = ckpttool.delta("model.safetensors", "tuned.safetensors", "one.delta.safetensors")
        >>> ckpttool.digest("one.delta.safetensors") == ckpttool.digest("tuned.safetensors")
        True
    """
    name = os.fspath(path)
    if layout not in (None, VLLM, *WRITTEN):
        raise UsageFault(
            f"--as {layout}: no such form is written", hint=f"give {', '.join(WRITTEN)} or {VLLM}"
        )
    if layout not in WRITTEN:
        _require_file(name, encoding or checksum)
    with opened(base) as older, opened(new) as newer:
        for each in (older, newer):
            if fault := elsewhere(each.path, each.tree):
                raise fault
        place = OutputPlace.at(name, force, (older,), newer)
        form = Publication.of(layout, name, older, encoding, checksum) if layout in WRITTEN else None
        place.require(partial(publishing.files_of, form.form) if form else None)
        before = _versions(older, newer)
        if expect is not None:
            expect(newer.nbytes * (2 if verify else 1))
        job = _Job(older, newer, name, progress or (lambda count: None), base_name, verify is not False)
        made = _frames(job, state, form) if form else _patch(job, state) if layout else _delta(job)
        _require_unchanged(before, _versions(older, newer))
        if form:
            saved = publishing.written(form, place, made.contents, dry_run=dry_run)
        else:
            choices: dict[str, Any] = {"verify": verify, "force": force, "dry_run": dry_run}
            saved = save(made.contents, name, to=safetensors.NAME, needed=(older,), **choices)
        if verify and layout != VLLM and not dry_run and name != "-":
            _require_same(job, name, state)
        kinds = {kind: made.kinds[kind] for kind in (SAME, SPARSE, XOR, NEW)}
        lacks = layout is None and not differences.is_there()
        return Delta(saved, kinds, newer.nbytes, made.digest, lacks)


def _require_file(name: str, choice: str | None) -> None:
    if choice:
        hint = f"give --as, which is one of {', '.join(WRITTEN)}"
        raise UsageFault("--encoding and --checksum are of the forms of other programs", hint=hint)
    is_named_otherwise = format_of_name(name) not in (None, safetensors.NAME) or unwritable(name)
    if is_named_otherwise and not os.path.isdir(name):
        hint = f"name it {shlex.quote(os.path.splitext(name.rstrip('/'))[0])}.safetensors"
        raise UsageFault(f"{name}: a delta is a file of safetensors, and its name says otherwise", hint=hint)


class _Made(NamedTuple):
    """What is to be written, how many tensors are kept in which way, the digest of the newer checkpoint."""

    contents: Any
    kinds: Counter[str]
    digest: str | None = None


def _delta(job: _Job) -> _Made:
    """Make a delta that holds all that is new."""
    base, new = job.base, job.new
    for checkpoint in (base, new):
        checkpoint.require_whole()
    if new.unread or new.opened:
        what = (new.unread or new.opened)[0]
        hint = f"keep what a delta can: ckpttool convert {shlex.quote(new.path)} NEW.pt"
        raise Refused(new.path, f"holds what a delta can't: {what[:200]}", hint=hint)
    flat = full.encode_entry(new.path, new.tree, new.protocol)
    of_base, prefix = base_tensors(base)
    state = new.found_state()
    own = "".join(f"{step}." for step in state.path) if state else ""
    ways = {SAME, SPARSE, NEW} | ({XOR} if differences.is_there() else set())
    pairs = {name: _pair(name, tensor, of_base, own, prefix) for name, tensor in flat.tensors.items()}
    made = _encoded(job, pairs, frozenset(ways))
    values = {name: entry.digest for name, entry in made.entries.items()}
    digest = digest_of_state(new, flat.tensors, values, job.progress)
    older = Base(_name_of(base) if job.base_name is None else job.base_name, prefix)
    tree = digest_of_tree(flat.text)
    header = Header(older, digest, tree, new.full, dict(new.metadata), made.entries)
    texts = {ENTRY: header.to_text(), TREE: flat.text}
    return _file(new.source, made, texts, digest)


def digest_of_state(
    checkpoint: Checkpoint,
    storages: Mapping[str, TensorRef],
    values: Mapping[str, str],
    progress: Progress | None,
) -> str | None:
    """Return the digest of a checkpoint's state; None where it has none, or it can't be said which.

    `storages` are its storages as tensors, whose digests are known by the same names and not read again.
    """
    if (found := checkpoint.found_state()) is None:
        return None
    try:
        state = with_parts(checkpoint.path, found)
    except Refused:
        return None
    of_storage = {id(tensor.storage): values[name] for name, tensor in storages.items()}
    wholes = {name: id(each.storage) for name, each in state.items() if _is_whole(each)}
    known = {name: of_storage[key] for name, key in wholes.items() if key in of_storage}
    others = {name: each for name, each in state.items() if name not in known}
    known |= {name: value.decode() for name, value in tensor_digests(others, progress)}
    return digest_of(state, known)


def _name_of(base: Checkpoint) -> str:
    """Return the name that a base has in its folder, of a chain that of the last delta; "" for stdin."""
    place = base.shards[-1].place if base.format == NAME else base.path
    if place == "-":
        return ""
    return os.path.basename(without_query(place).rstrip("/") if is_url(place) else os.path.abspath(place))


def _pair(name: str, new: TensorRef, of_base: Mapping[str, TensorRef], own: str, prefix: str) -> DeltaPair:
    """Return a tensor with that of the base which has its name in the model's state, or in the file."""
    names = [prefix + name.removeprefix(own)] if name.startswith(own) else []
    for other in (*names, name):
        base = of_base.get(other)
        is_like = base is not None and (base.dtype, base.nbytes) == (new.dtype, new.nbytes)
        if is_like and new.dtype.itemsize in differences.UNSIGNED:  # not the three bytes of F6
            return DeltaPair(name, new, base, other)
    return DeltaPair(name, new)


def _patch(job: _Job, where: str | None) -> _Made:
    """Make a file for vLLM's patches: flat places as int32 and the values there."""
    pairs = publishing.alike(job.base, job.new, where)
    for name, pair in pairs.items():
        if pair.new.numel > INT32:
            raise Refused(job.new.path, f"'{name[:80]}' has places that int32 can't name")
    made = _encoded(job, pairs, frozenset((SAME, SPARSE)))
    shapes = {name: entry.shape for name, entry in made.entries.items() if entry.kind == SPARSE}
    texts = {"shapes": json.dumps(shapes, ensure_ascii=False, separators=(",", ":"))}
    return _file(job.new.source, made, OF_TORCH | texts)


def _frames(job: _Job, where: str | None, form: Publication) -> _Made:
    """Make the files of another program's form."""
    pairs = publishing.each_once(job.base, job.new, publishing.alike(job.base, job.new, where))
    with Checksums(job.base, job.base.storages() if job.compares else ()) as of_base:
        with Checksums(job.new, job.new.storages() if job.compares else ()) as of_new:
            contents = publishing.of_frames(form, job.path, pairs, job.progress)
            of_new.finish()
        of_base.finish()
    return _Made(contents, Counter({SAME: len(pairs) - contents.keys, XOR: contents.keys}))


def _encoded(job: _Job, pairs: Mapping[str, DeltaPair], ways: frozenset[str]) -> Encoded:
    """Encode tensors. Raises Damaged where what was read has another checksum than its file states."""
    compared = pairs if job.compares else {}
    new = [(name, pair.new.storage) for name, pair in compared.items() if not _is_whole(pair.new)]
    base = [(n, p.base.storage) for n, p in compared.items() if p.base and not _is_whole(p.base)]
    # A checksum is of a whole storage: what views leave out of it is read, too.
    with Checksums(job.new, new) as of_new, Checksums(job.base, base) as of_base:
        made = Encoder(job.path, ways=ways).encode(pairs, job.progress)
        of_new.finish()
        of_base.finish()
    for name, pair in compared.items():
        entry = made.entries[name]
        read = [(job.new, pair.new, entry.crc32)]
        if pair.base is not None and entry.kind != NEW:
            read.append((job.base, pair.base, entry.base_crc32))
        for checkpoint, tensor, crc in read:
            if _is_whole(tensor) and tensor.storage.crc32 not in (None, crc):
                raise unmatched(checkpoint, name, tensor.storage)
    return made


def _is_whole(tensor: TensorRef) -> bool:
    return tensor.is_stretch and tensor.nbytes == tensor.storage.nbytes


def _file(source: Source, made: Encoded, texts: Mapping[str, str], digest: str | None = None) -> _Made:
    file = Checkpoint(source, safetensors.NAME, OrderedDict_(made.tensors), metadata=texts)
    return _Made(file, Counter(entry.kind for entry in made.entries.values()), digest)


def _versions(*checkpoints: Checkpoint) -> dict[str, tuple[object, ...]]:
    sources = (source for checkpoint in checkpoints for source in checkpoint.sources)
    return {source.path: source.version for source in sources}


def _require_unchanged(before: Mapping[str, object], after: Mapping[str, object]) -> None:
    for path, version in before.items():
        if after[path] != version:
            raise Refused(path, "was changed while it was read", hint="wait until its writer is done")


def _require_same(job: _Job, path: str, where: str | None) -> None:
    """Apply what was written, and compare what comes of it with what was meant."""
    with open_alone(path) as file:
        made = joined(DeltaLink(job.base), file, digests=True).checkpoint
        if file.format in FORMS:
            states = [checkpoint.state(where).tensors for checkpoint in (made, job.new)]
            is_same = digest(states[0], job.progress) == digest(states[1])
        else:
            with Checksums(made, made.storages()) as checksums:
                is_same = not checksums.damaged(job.progress)
        if not is_same:
            raise Refused(path, FALSE)
