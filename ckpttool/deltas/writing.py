"""A delta written: what changed between two checkpoints, as a file of tensors."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from ..core.checkpoint import full
from ..core.checkpoint.checkpoint import OF_TORCH, Checkpoint
from ..core.checkpoint.checksums import Checksums, require_made, unmatched, with_parts
from ..core.checkpoint.special_tensors import require_plain
from ..core.checkpoint.state import elsewhere
from ..core.files.digest import digest, digest_of, tensor_digests
from ..core.files.threads import Progress
from ..core.formats import safetensors
from ..core.formats.destination import Saved, format_of_name
from ..core.formats.output import OutputPlace
from ..core.formats.reading import File, open_alone, opened
from ..core.formats.reading import open as open_any
from ..core.formats.saving import save
from ..core.formats.strangers import unwritable
from ..core.inert_pickle.values import OrderedDict_
from ..core.remote.places import visit
from ..core.remote.urls import canonical, is_url, without_query
from ..core.tensors.ref import Source, TensorRef
from ..core.tensors.values import same_values
from ..errors import Refused, UsageFault
from . import differences, publishing, versions
from .encoding import INT32, DeltaPair, Encoded, Encoder
from .forms import FORMS, WRITTEN, number_in
from .header import ENTRY, NEW, SAME, SPARSE, TREE, XOR, Base, Header, digest_of_tree, read_header
from .publishing import Publication
from .reading import LONGEST, NAME, DeltaLink, base_tensors, joined, wrong_base

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
    digest = _digest_of_state(new, flat.tensors, values, job.progress)
    own_name = "" if base.path == "-" else _name_of(base)
    beside = own_name if job.base_name is None else job.base_name
    older, tree = Base(beside, prefix), digest_of_tree(flat.text)
    header = Header(older, digest, tree, new.full, dict(new.metadata), made.entries)
    texts = {ENTRY: header.to_text(), TREE: flat.text}
    return _file(new.source, made, texts, digest)


def _digest_of_state(
    checkpoint: Checkpoint,
    storages: Mapping[str, TensorRef],
    values: Mapping[str, str],
    progress: Progress | None,
) -> str | None:
    """Return the digest of a checkpoint's state; None where it has none, or it can't be said which.

    `storages` are its storages as tensors, whose digests are known by the same names and not read again.
    """
    state = _state_of(checkpoint)
    if state is None:
        return None
    of_storage = {id(tensor.storage): values[name] for name, tensor in storages.items()}
    wholes = {name: each for name, each in state.items() if _is_whole(each)}
    known = {
        name: of_storage[id(each.storage)] for name, each in wholes.items() if id(each.storage) in of_storage
    }
    others = {each.view: (name, each) for name, each in state.items() if name not in known}
    read = tensor_digests(dict(others.values()), progress)
    of_view = {state[name].view: value.decode() for name, value in read}
    known |= {name: of_view[each.view] for name, each in state.items() if name not in known}
    return digest_of(state, known)


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
    if header.digest not in (None, _digest_of_state(made, flat.tensors, values, progress)):
        yield found.where if found else "", f"has another digest than {source.path} states"


def _state_of(checkpoint: Checkpoint) -> Mapping[str, TensorRef] | None:
    if (state := checkpoint.found_state()) is None:
        return None
    try:
        return with_parts(checkpoint.path, state)
    except Refused:
        return None


def _name_of(base: Checkpoint) -> str:
    """Return the name that a base has in its folder: of a chain that of the last delta."""
    place = base.shards[-1].place if base.format == NAME else base.path
    return os.path.basename(without_query(place).rstrip("/") if is_url(place) else os.path.abspath(place))


def _pair(name: str, new: TensorRef, of_base: Mapping[str, TensorRef], own: str, prefix: str) -> DeltaPair:
    """Return a tensor with that of the base which has its name in the model's state, or in the file."""
    names = [prefix + name.removeprefix(own)] if name.startswith(own) else []
    for other in (*names, name):
        base = of_base.get(other)
        if base is not None and (base.dtype, base.nbytes) == (new.dtype, new.nbytes):
            return DeltaPair(name, new, base, other)
    return DeltaPair(name, new)


def _alike(job: _Job, where: str | None) -> dict[str, DeltaPair]:
    """Return the tensors of both states in pairs; refuse what is no change of values alone."""
    states = [checkpoint.state(where) for checkpoint in (job.base, job.new)]
    for checkpoint, state in zip((job.base, job.new), states, strict=True):
        require_plain(checkpoint.path, state.likes, "can't be patched")
    old, new = (state.tensors for state in states)
    for name in (*new, *old):
        forms = [(each[name].dtype.name, each[name].shape) if name in each else None for each in (old, new)]
        if forms[0] != forms[1]:
            said = [f"{form[0]} {list(form[1])}" if form else "missing" for form in forms]
            what = (
                f"'{name[:80]}' is {said[1]}, and {said[0]} in {job.base.path}: a patch changes values alone"
            )
            raise Refused(job.new.path, what, hint="leave out --as: our own form holds it")
        if (kind := new[name].dtype).safetensors is None:
            raise Refused(job.new.path, f"'{name[:80]}' is {kind.name}, a type that safetensors lacks")
    return {name: DeltaPair(name, new[name], old[name], name) for name in new}


def _once(job: _Job, pairs: Mapping[str, DeltaPair]) -> dict[str, DeltaPair]:
    """Return pairs without the other names of tensors, which no file of safetensors has.

    Raises Refused where such a name is no longer one: there is no place for its values.
    """
    olds = {name: pair.base for name, pair in pairs.items() if pair.base is not None}
    ties = safetensors.ties(olds, job.base.metadata)
    for name, kept in ties.items():
        if pairs[name].new.view != pairs[kept].new.view and not same_values(pairs[name].new, pairs[kept].new):
            what = f"'{name[:80]}' is no longer another name of '{kept[:80]}', as in {job.base.path}"
            raise Refused(job.new.path, what, hint="leave out --as: our own form holds it")
    return {name: pair for name, pair in pairs.items() if name not in ties}


def _patch(job: _Job, where: str | None) -> _Made:
    """Make a file for vLLM's patches: flat places as int32 and the values there."""
    pairs = _alike(job, where)
    for name, pair in pairs.items():
        if pair.new.numel > INT32:
            raise Refused(job.new.path, f"'{name[:80]}' has places that int32 can't name")
    made = _encoded(job, pairs, frozenset((SAME, SPARSE)))
    shapes = {name: entry.shape for name, entry in made.entries.items() if entry.kind == SPARSE}
    texts = {"shapes": json.dumps(shapes, ensure_ascii=False, separators=(",", ":"))}
    return _file(job.new.source, made, OF_TORCH | texts)


def _frames(job: _Job, where: str | None, form: Publication) -> _Made:
    """Make the files of another program's form."""
    pairs = _once(job, _alike(job, where))
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


# ---- Deltas applied to a base: nothing counts before the base, and what comes of it, are what they
# state.


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
